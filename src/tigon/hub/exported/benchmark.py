"""For `kernels benchmark`: layers beside the same formulae in plain torch, whose results they must give."""

import torch
import torch.nn.functional as F
from kernels.benchmark import Benchmark


class TigonBenchmark(Benchmark):
    seed = 0

    def _draw(self, *shape: int) -> torch.Tensor:
        dtype = torch.float32 if self.device == "cpu" else torch.bfloat16
        return torch.randn(*shape, device=self.device, dtype=dtype)

    def setup_rms_norm(self) -> None:
        self.x, self.weight = self._draw(4096, 4096), self._draw(4096)

    def benchmark_rms_norm(self) -> None:
        self.out = self.kernel.rms_norm(self.x, self.weight)

    def verify_rms_norm(self) -> torch.Tensor:
        x = self.x.float()
        return self.weight * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)).to(self.x.dtype)

    def setup_swiglu(self) -> None:
        self.gate, self.up = self._draw(2048, 11008), self._draw(2048, 11008)

    def benchmark_swiglu(self) -> None:
        self.out = self.kernel.swiglu(self.gate, self.up)

    def verify_swiglu(self) -> torch.Tensor:
        return F.silu(self.gate) * self.up

    def setup_cross_entropy(self) -> None:
        self.logits = self._draw(1024, 32000)
        self.labels = torch.randint(32000, (1024,), device=self.device)

    def benchmark_cross_entropy(self) -> None:
        self.out = self.kernel.cross_entropy(self.logits, self.labels)

    def verify_cross_entropy(self) -> torch.Tensor:
        return F.cross_entropy(self.logits.float(), self.labels)
