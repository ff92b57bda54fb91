# The package with all extras, on a processor:
#
#   docker build -t dualdelay .
#   docker run --rm -v "$PWD:/work" --user "$(id -u):$(id -g)" dualdelay compare 'dude[lr=0.05|0.1]' --problem digits \
#       --time 50 --folder runs/first
#
# For GPUs: docker build --build-arg TORCH_INDEX= -t dualdelay . and docker run --gpus all ...
#
# The targets server and site have the extra sites alone; deploy/compose.yaml starts them:
#
#   docker build --target server -t dualdelay-server .
#   docker build --target site -t dualdelay-site .

FROM python:3.11-slim AS build
RUN apt-get update && apt-get install -y --no-install-recommends git
COPY . /source
# the repository belongs to somebody else, which git refuses; its tags are the version
RUN git config --global --add safe.directory /source \
    && pip install --no-cache-dir build && python -m build --wheel --outdir /wheels /source

FROM python:3.11-slim AS sites
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
RUN --mount=type=bind,from=build,source=/wheels,target=/wheels \
    --mount=type=bind,source=constraints.txt,target=/constraints.txt \
    pip install --no-cache-dir ${TORCH_INDEX:+--extra-index-url "$TORCH_INDEX"} -c /constraints.txt "$(echo /wheels/*.whl)[sites]"
# whom compose.yaml names instead is whoever owns the keys
RUN useradd --uid 1000 --create-home dualdelay && mkdir /work /runs && chown dualdelay /runs
USER 1000:1000
ENV HOME=/tmp
# the run's own file is mounted here, and a key where the command says
WORKDIR /work
# Python hears it from its first moment on, also as process 1, and SIGTERM not before the program has begun
STOPSIGNAL SIGINT

FROM sites AS server
VOLUME /runs
EXPOSE 8443
# the certificate has another name than this address, which is the container's own
HEALTHCHECK --interval=30s --timeout=10s --start-period=2m CMD ["python", "-c", "import http.client, ssl; \
line = http.client.HTTPSConnection('127.0.0.1', 8443, timeout=5, context=ssl._create_unverified_context()); \
line.request('GET', '/'); assert line.getresponse().status == 200"]
ENTRYPOINT ["dualdelay", "serve"]
CMD ["--help"]

FROM sites AS site
ENTRYPOINT ["dualdelay", "site"]
CMD ["--help"]

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
