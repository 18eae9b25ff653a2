#!/usr/bin/env bash
# A real SGLang server of a tiny model on this machine's CPU, and test_real.py against it:
#
#     tests/inference/sglang/real.sh FOLDER      (about 1 GB is installed into FOLDER, which can be used again)
#
# SGLang's kernels have no CPU build on PyPI. On a CPU it computes with torch where there are none, so an empty package stands in
# for them, and for torchvision in the two files that import it for models of images. Everything else is SGLang as released.
set -euo pipefail

VERSION=0.5.23
PORT=${PORT:-30117}
ROOT=$(cd "$(dirname "$0")/../../.." && pwd)
OURS=$ROOT/.venv/bin/python
FOLDER=$(mkdir -p "$1" && cd "$1" && pwd)
ENV=$FOLDER/env
PARTS="fastapi orjson uvloop pyzmq msgspec pybase64 psutil setproctitle python-multipart requests aiohttp prometheus-client IPython
    partial_json_parser interegular einops sentencepiece tiktoken zstandard xxhash watchfiles py-spy openai==2.8.0 cffi dill loguru
    apache-tvm-ffi gguf soundfile"
ALONE="sglang==$VERSION triton compressed-tensors xgrammar" # without what they ask for: other builds of torch

if [ ! -f "$FOLDER/.installed" ]; then
    $OURS -m venv --clear "$ENV"
    SITE=$("$ENV/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    $OURS -c 'import site; print(site.getsitepackages()[0])' > "$SITE/torch_and_transformers.pth"
    # shellcheck disable=SC2086
    "$ENV/bin/python" -m pip install --quiet $PARTS
    # shellcheck disable=SC2086
    "$ENV/bin/python" -m pip install --quiet --no-deps $ALONE
    mkdir -p "$SITE/sgl_kernel"
    cat > "$SITE/sgl_kernel/__init__.py" <<'PYTHON'
def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*args, **kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} on a CPU")

    return missing
PYTHON
    sed -i -E 's/^(import|from) torchvision.*/T = TF = InterpolationMode = __import__("unittest.mock").mock.MagicMock()/' \
        "$SITE/sglang/srt/multimodal/internvl_utils.py" "$SITE/sglang/srt/configs/deepseek_ocr.py"
    touch "$FOLDER/.installed"
fi

export OMP_NUM_THREADS=1
(cd "$ROOT" && $OURS - "$FOLDER/model" <<'PYTHON'
import sys
from pathlib import Path

from burnish.config.loading import load
from burnish.config.schema import TrainConfig
from burnish.distributed.roles import build_policy
from burnish.models.decoder import initialise

new = "model.new={hidden_size: 64, num_heads: 4, num_kv_heads: 2, mlp_size: 96, max_positions: 256}"
config = load(TrainConfig, None, [new, "data.train.task=sort_digits"]).config
policy = build_policy(config.model, config.data.train, 0, None)
initialise(policy.module, 0, std=0.3)
Path(sys.argv[1]).mkdir(exist_ok=True)
policy.save(Path(sys.argv[1]))
PYTHON
)

cd "$FOLDER"
SGLANG_USE_CPU_ENGINE=1 HF_HUB_OFFLINE=1 setsid "$ENV/bin/python" -m sglang.launch_server --model-path "$FOLDER/model" --device cpu \
    --attention-backend torch_native --sampling-backend pytorch --dtype float32 --max-total-tokens 8192 --max-running-requests 32 \
    --disable-overlap-schedule --disable-cuda-graph --skip-server-warmup --port "$PORT" > server.log 2>&1 &
SERVER=$!
trap 'kill -9 -- -$SERVER 2>/dev/null || true' EXIT
for _ in $(seq 150); do
    if curl --silent --fail --max-time 2 "http://127.0.0.1:$PORT/model_info" > /dev/null; then break; fi
    if ! kill -0 $SERVER 2>/dev/null; then
        tail -20 server.log
        exit 1
    fi
    sleep 1
done
cd "$ROOT"
SGLANG_URL=http://127.0.0.1:$PORT SGLANG_MODEL=$FOLDER/model $OURS -m pytest tests/inference/sglang/test_sglang_real.py -rs
