#!/usr/bin/env bash
# Regenerate the committed stubs: protos/generate.sh [PYTHON], a Python that has protos/requirements.txt installed.
set -euo pipefail
python=$(realpath -s "$(command -v "${1:-python}")")
cd "$(dirname "$0")"
PATH="$(dirname "$python"):$PATH"
rm -f perfcast/v1/*_pb2*.py perfcast/v1/*_pb2*.pyi
"$python" -m grpc_tools.protoc -I . --python_out=. --grpc_python_out=. --mypy_out=quiet:. --mypy_grpc_out=quiet:. \
    perfcast/v1/*.proto
