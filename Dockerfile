# For a machine with an NVIDIA card and its container toolkit; see docker-compose.yml.
FROM python:3.11-slim-bookworm

# Triton compiles the launchers of its kernels with a C compiler when the model is loaded.
RUN apt-get update \
    && apt-get install -y --no-install-recommends gcc libc6-dev \
    && rm -rf /var/lib/apt/lists/*

COPY . /source
RUN pip install --no-cache-dir --constraint /source/constraints.txt /source && rm -r /source

RUN useradd --create-home --uid 1000 appliance && install -d -o appliance /cache
USER appliance
WORKDIR /home/appliance

# A port can be published only if the server listens on all addresses of its container; that takes an API key or
# APPLIANCE_AUTH=false.
ENV APPLIANCE_HOST=0.0.0.0 \
    APPLIANCE_CACHE=/cache \
    TRITON_CACHE_DIR=/cache/triton
VOLUME /cache
EXPOSE 8000
ENTRYPOINT ["appliance", "serve"]
