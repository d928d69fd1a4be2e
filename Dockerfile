# The image of one rank, or of all ranks of a host.
#
#   docker build -t ddp_manual:cpu .
#   docker build -t ddp_manual:cuda --build-arg TORCH=cu130 .
#
#   docker run --rm ddp_manual:cpu launch --nproc 2 -- --dataset synthetic --data_dir /tmp/data --epochs 1
#
# For a script of yours, another Dockerfile: FROM ddp_manual:cpu, then COPY train.py .
ARG PYTHON=3.12
FROM python:${PYTHON}-slim

# The first process of a container gets no signal that it does not handle, as Python in its first moment, and inherits
# processes whose parent was killed. tini passes every signal on, reaps those processes, and ends with the rank's exit code.
RUN apt-get update && apt-get install --yes --no-install-recommends tini && rm -rf /var/lib/apt/lists/*

# A folder of https://download.pytorch.org/whl/: cpu, or for GPUs the CUDA version, such as cu126 or cu130. The wheels for GPUs
# bring CUDA and NCCL along; the machine needs the driver only.
ARG TORCH=cpu
RUN python -m pip install --no-cache-dir --root-user-action=ignore \
        --index-url https://download.pytorch.org/whl/${TORCH} torch torchvision

# After torch, which takes gigabytes and changes rarely.
WORKDIR /usr/src/ddp_manual
COPY pyproject.toml setup.cfg README.md LICENSE run_multi_gpu_train.py ./
COPY ddp_manual ddp_manual
RUN python -m pip install --no-cache-dir --root-user-action=ignore .

# By number: Kubernetes' runAsNonRoot cannot tell whether a name is root.
RUN useradd --uid 1000 --create-home ddp
USER 1000
WORKDIR /home/ddp

# So that "docker logs" and "kubectl logs" show what a script prints when it prints it.
ENV PYTHONUNBUFFERED=1
# Without a shell in between, which would not pass SIGTERM on.
ENTRYPOINT ["tini", "--", "ddp-manual"]
CMD ["--help"]
