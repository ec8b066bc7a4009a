"""For hatchling: a wheel has a copy of its operators and layers in it, in the form that `kernels` loads."""

import importlib.util
import tempfile
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class WheelHook(BuildHookInterface):
    def initialize(self, version: str, build_data: dict) -> None:
        if version == "editable":
            return
        source = Path(self.root) / "src" / "tigon" / "hub" / "_export.py"
        spec = importlib.util.spec_from_file_location("tigon_export", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.folder = tempfile.TemporaryDirectory()
        root = Path(self.folder.name)
        for backend in module.BACKENDS:
            module.export_backend(root, backend)
        build_data["force_include"][str(root / "build")] = "tigon/hub/repository/build"

    def finalize(self, version: str, build_data: dict, artifact_path: str) -> None:
        if version != "editable":
            self.folder.cleanup()
