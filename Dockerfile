# The CPU system in one image. torch's CPU build comes from PyTorch's own index, named at build time:
#   docker build --build-arg PIP_EXTRA_INDEX_URL=<PyTorch's CPU index> -t paceline .
#   docker run -p 8000:8000 -v paceline:/var/lib/paceline paceline
FROM python:3.11-slim AS build
ARG PIP_EXTRA_INDEX_URL=""
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN python -m venv /opt/paceline
WORKDIR /src
COPY requirements/cpu.lock requirements/cpu.lock
RUN /opt/paceline/bin/pip install --no-deps -r requirements/cpu.lock
COPY . .
RUN /opt/paceline/bin/pip install --no-deps --no-build-isolation .

FROM python:3.11-slim
# The compiler is for torch.compile, which vLLM uses on a CPU; libnuma is what vLLM's CPU kernels link to.
RUN apt-get update && apt-get install -y --no-install-recommends g++ libnuma1 && rm -rf /var/lib/apt/lists/* \
    && useradd --create-home --uid 10001 paceline && install -d -o paceline /var/lib/paceline
COPY --from=build /opt/paceline /opt/paceline
ENV PATH=/opt/paceline/bin:$PATH PACELINE_HOME=/var/lib/paceline
USER paceline
WORKDIR /var/lib/paceline
VOLUME /var/lib/paceline
EXPOSE 8000
HEALTHCHECK --interval=30s --start-period=5m CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/ready')"]
ENTRYPOINT ["paceline"]
CMD ["up", "--set", "gateway.host=0.0.0.0"]
