#!/usr/bin/env bash
# Makes the virtual environment that every make target runs in: tools/setup.sh VENV PYTHON TORCH TRITON
#
# If PYTHON has torch and triton, as on most GPU machines, the venv uses them. Otherwise the named versions of both are
# installed: an unpinned torch may bring gigabytes of CUDA libraries. Packages come from pip's index; without a network,
# from wheels in .whl/ and from PYTHON's own packages, and VENV/offline then lists what is missing.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=$1 python=$2 torch=$3 triton=$4

rm -rf "$venv"
if "$python" -c 'import torch, triton' 2>/dev/null; then
    echo "set-up: reusing torch and triton of $("$python" -c 'import sys; print(sys.executable)')"
    # --system-site-packages would add the base interpreter's packages, but PYTHON may itself be of a venv. So a .pth file
    # adds PYTHON's own folders, after the venv's: a package that is installed in both comes from the venv.
    "$python" -m venv --without-pip "$venv"
    "$python" - "$venv" <<'PY'
import pathlib, subprocess, sys, sysconfig

folders = [p for p in sys.path if pathlib.Path(p).name in ("site-packages", "dist-packages")]
own = pathlib.Path(sysconfig.get_path("purelib", vars={"base": sys.argv[1], "platbase": sys.argv[1]}))
if not own.is_dir():  # some distributions use other folders: ask the venv itself
    command = [f"{sys.argv[1]}/bin/python", "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    own = pathlib.Path(subprocess.check_output(command, text=True).strip())
(own / "zz_base_packages.pth").write_text("".join(f"{f}\n" for f in folders))
PY
    "$venv/bin/python" -m pip --version >/dev/null 2>&1 || "$venv/bin/python" -m ensurepip -q
    base=()
else
    "$python" -m venv "$venv"
    base=("$torch" "$triton")
fi

pip() { "$venv/bin/python" -m pip --disable-pip-version-check "$@"; }
wheels=()
[ -d .whl ] && wheels=(--find-links .whl)

# hatchling first: it then builds the project, without an isolated build environment that pip would download.
# --no-compile: many modules are never imported, and Python keeps the bytecode of those that are.
install() {
    pip install -qq --no-compile "$@" "${wheels[@]}" ${base[@]+"${base[@]}"} 'hatchling>=1.26' &&
        pip install -qq --no-compile "$@" "${wheels[@]}" ${base[@]+"${base[@]}"} --no-build-isolation -e '.[dev]'
}
# First without the network: the packages at hand may suffice, and a missing network takes minutes to time out.
log=$venv/set-up.log
if [ ${#base[@]} -eq 0 ] && install --no-index 2>"$log"; then
    echo "set-up: everything was here already"
elif install --retries 2 2>>"$log"; then
    :
elif [ ${#base[@]} -eq 0 ]; then
    echo "set-up: no network; using the packages of $python and .whl/"
    touch "$venv/offline"
    [ -d .whl ] && pip install -qq --no-index --no-deps .whl/*.whl
    if ! pip install -qq --no-index --no-deps --no-build-isolation -e . 2>>"$log"; then
        "$venv/bin/python" -c 'import pathlib, sysconfig; pathlib.Path(sysconfig.get_path("purelib"), "triplan.pth").write_text(str(pathlib.Path.cwd()))'
    fi
    for module in torch triton pydantic; do
        "$venv/bin/python" -W ignore -c "import $module" || { echo "set-up: $module cannot be fetched" >&2; exit 1; }
    done
    for module in typer rich hypothesis pytest xdist sklearn matplotlib ruff mypy basedpyright build hatchling; do
        "$venv/bin/python" -W ignore -c "import $module" 2>/dev/null || echo "$module" >>"$venv/offline"
    done
    [ ! -s "$venv/offline" ] || echo "set-up: missing here: $(paste -sd' ' "$venv/offline")"
else
    cat "$log" >&2
    echo "set-up: pip could not install what triplan needs" >&2
    exit 1
fi
