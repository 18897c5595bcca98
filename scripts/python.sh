# Sourced by the scripts here: where the environment is, and how it is made. Not run by itself.

top=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv="$top/.venv"
python="$venv/bin/python"
# The compiler of the shipped proofs and its headers, as in tuner/compile/toolchain.py.
compiler='cuda-toolkit[cccl,crt,cudart,nvcc,nvvm]==13.0.2'

die() {
  printf '%s\n' "$*" >&2
  exit 1
}

# The first Python >= 3.11 among $PYTHON, python3 and the versioned names.
find_python() {
  local candidate
  for candidate in ${PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  die "cutlass-tuner needs Python >= 3.11, and ${PYTHON:-python3} is none: install one, or name it, PYTHON=/path/to/python $0"
}

# Installed, not imported: that takes seconds. Every Python here is started with -P: it runs no
# module of the folder that the user is in.
has_torch() {
  "$1" -P -c 'import importlib.util, sys; sys.exit(importlib.util.find_spec("torch") is None)'
}

# A torch that the base Python has (a GPU machine's own, say) is seen from the environment too.
make_venv() {
  [ -x "$python" ] && return
  local base options=()
  base=$(find_python)
  if has_torch "$base"; then options+=(--system-site-packages); fi
  echo "making $venv with $base" >&2
  if ! "$base" -P -m venv ${options[@]+"${options[@]}"} "$venv" >/dev/null 2>&1; then
    rm -rf "$venv" # half made: it has a python and no pip
    die "$base cannot make a virtual environment (Debian, Ubuntu: apt install python3-venv)"
  fi
}

# install NAME REQUIREMENT...: once for each pyproject.toml, remembered in a stamp file.
install() {
  local name=$1 stamp
  shift
  make_venv
  stamp="$venv/.$name-$(printf '%s\n' "$@" | cat "$top/pyproject.toml" - | cksum | tr ' ' -)"
  [ -e "$stamp" ] && return
  echo "installing $* (once)" >&2
  # Bytecode is half of pip's time: it writes it on one core, compileall on all. A third of it is of
  # what nothing here imports.
  local unused='/(tests|testing/_internal|transformers/models|pip)/'
  trap 'die "interrupted while packages were being installed: the same command goes on"' INT TERM
  (cd "$top" && "$python" -P -m pip install --disable-pip-version-check --no-compile --quiet "$@") >&2 ||
    die "pip could not install $* into $venv (offline: scripts/wheelhouse makes a folder for PIP_FIND_LINKS)"
  trap - INT TERM
  "$python" -P -m compileall -q -j 0 -x "$unused" "$venv"/lib/python*/site-packages >/dev/null 2>&1 || true
  rm -f "$venv/.$name-"*
  touch "$stamp"
}
