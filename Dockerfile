# The package with all extras, on a processor:
#
#   docker build -t dualdelay .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" dualdelay compare 'dude[lr=0.05|0.1]' --problem digits \
#       --time 50 --folder runs/first
#
# For GPUs: docker build --build-arg TORCH_INDEX= -t dualdelay . and docker run --gpus all ...

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends git
COPY . /source
# the repository belongs to somebody else, which git refuses; its tags are the version
RUN git config --global --add safe.directory /source \
    && pip install --no-cache-dir build && python -m build --wheel --outdir /wheels /source

FROM python:3.11-slim
# torch for processors is a tenth of the size of the one for GPUs
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /constraints.txt "$(echo /wheels/*.whl)[all]"
RUN useradd --create-home dualdelay && mkdir /work && chown dualdelay /work
USER dualdelay
# whoever --user names has no home there
ENV HOME=/tmp MPLCONFIGDIR=/tmp/matplotlib
WORKDIR /work
ENTRYPOINT ["dualdelay"]
CMD ["--help"]
