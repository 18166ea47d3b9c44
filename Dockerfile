# rlft in a container, with the exact versions of pins/: `docker build --target cpu --tag rlft .`, or cuda, and then
#   docker run --rm --volume "$PWD/runs:/work/runs" rlft train +recipe=grpo_arithmetic   # with CUDA also --gpus all
# reward=code isolates programs by user namespaces, which Docker forbids: add --security-opt seccomp=unconfined to the run
# (and --security-opt apparmor=unconfined where AppArmor is on), or set allow_unsafe=true: the container is a sandbox, too.
# With --build-arg PIP_EXTRA_INDEX_URL=<index>, pip also looks there, for instance for a torch without CUDA.
FROM python:3.12-slim AS base
ARG PIP_EXTRA_INDEX_URL
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PYTHONUNBUFFERED=1 PATH=/opt/rlft/bin:$PATH
# bubblewrap: the sandbox of reward=code
RUN apt-get update && apt-get install --yes --no-install-recommends bubblewrap && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/rlft
WORKDIR /src
COPY pins pins

FROM base AS cpu
RUN pip install --requirement pins/cpu.txt
COPY . .
RUN pip install .
WORKDIR /work
ENTRYPOINT ["rlft"]

FROM base AS cuda
# Triton compiles kernels with a C compiler when they are first used.
RUN apt-get update && apt-get install --yes --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN pip install --requirement pins/cuda.txt
COPY . .
RUN pip install '.[ray,vllm]'
WORKDIR /work
ENTRYPOINT ["rlft"]
