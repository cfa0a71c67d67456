# What a GPU worker runs on: SGLang's image for CUDA 13 with its torch, transformers and kernels as they are, and beside
# them Prefect, DVC and MLflow. Build from the root of the repository:
#   docker build --file docker/gpu.Dockerfile --tag polyturn-gpu .
ARG SGLANG_IMAGE_TAG=v0.5.15-cu130
# hadolint ignore=DL3006
FROM lmsysorg/sglang:${SGLANG_IMAGE_TAG}
SHELL ["/bin/bash", "-o", "pipefail", "-c"]

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git openssh-client tini \
    && rm -rf /var/lib/apt/lists/*

# What the engine came with is a constraint of everything after it: pip fails where it would have to swap torch.
WORKDIR /opt/polyturn
RUN python3 -m pip freeze --all --exclude-editable \
    | grep -iE '^(torch|torchvision|torchaudio|triton|transformers|tokenizers|sglang|sglang-kernel|sgl-kernel|flashinfer[a-z-]*|numpy|nvidia-[a-z0-9-]+)==' \
    > constraints-engine.txt \
    && python3 -c "import torch; print(torch.__version__)" > torch.version
COPY pyproject.toml README.md LICENSE ./
RUN mkdir polyturn && touch polyturn/__init__.py \
    && python3 -m pip install --no-cache-dir --break-system-packages --constraint constraints-engine.txt \
       ".[server]" "megatron-core>=0.16.1,<0.20" "nvidia-ml-py>=12" \
    && python3 -c "import torch; assert torch.__version__ == open('torch.version').read().strip()"

COPY docker/enter.sh docker/healthy.py /opt/polyturn/
RUN git config --system --add safe.directory '*' && mkdir -p /srv
ENV POLYTURN_ROOT=/srv/polyturn \
    PYTHONPATH=/srv/polyturn \
    PREFECT_HOME=/srv/.prefect \
    PREFECT_SERVER_ANALYTICS_ENABLED=false \
    MLFLOW_DISABLE_TELEMETRY=true \
    DO_NOT_TRACK=1
WORKDIR /srv
ENTRYPOINT ["/usr/bin/tini", "--", "/opt/polyturn/enter.sh"]
CMD ["worker", "polyturn-gpu"]
