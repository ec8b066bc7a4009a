#!/bin/sh
# Makes the development environment: tools/setup.sh PYTHON VENV
# TIGON_TORCH="torch==2.13.0 --index-url https://..." chooses the torch build by hand.
set -eu
python=$1
venv=$2

command -v "$python" >/dev/null 2>&1 || {
    echo "tigon: '$python' is not installed. Python 3.10 or newer is needed: make PYTHON=/path/to/python3" >&2
    exit 1
}
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
    echo "tigon: '$python' is $("$python" -V 2>&1). Python 3.10 or newer is needed: make PYTHON=/path/to/python3" >&2
    exit 1
}
[ -x "$venv/bin/python" ] || "$python" -m venv "$venv" || {
    echo "tigon: '$python' cannot make a virtual environment (on Debian: apt-get install python3-venv)" >&2
    exit 1
}

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --quiet "$@"; }
torch=$(sed -n 's/^\(torch==[0-9.]*\).*/\1/p' requirements-dev.txt)

if [ -n "${TIGON_TORCH:-}" ]; then
    echo "tigon: installing $TIGON_TORCH"
    # Unquoted, so that options after the requirement are options.
    pip install $TIGON_TORCH
elif [ "$(uname -s)" != Linux ] || nvidia-smi -L >/dev/null 2>&1; then
    echo "tigon: installing $torch"
    pip install "$torch"
else
    # The default build brings gigabytes of GPU libraries that this machine cannot use.
    echo "tigon: no GPU here, installing a CPU build of $torch"
    pip install "$torch+cpu" 2>/dev/null \
        || pip install "$torch" --index-url https://download.pytorch.org/whl/cpu \
        || pip install "$torch"
fi

requirements=$venv/requirements.txt
needs_triton='import importlib.metadata as m, sys; sys.exit(not any(r.startswith("triton") for r in m.requires("torch")))'
if "$venv/bin/python" -c "$needs_triton"; then
    # This torch came with the Triton that it was built for.
    grep -v '^triton' requirements-dev.txt >"$requirements"
else
    cp requirements-dev.txt "$requirements"
fi
echo "tigon: installing the other packages, a minute or two"
pip install -r "$requirements"
pip install --no-deps -e .
echo "tigon: ready in $venv; source $venv/bin/activate to use it"
