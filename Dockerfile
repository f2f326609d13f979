# docker build -t fips .                              PyTorch for CPUs
# docker build -t fips --build-arg TORCH=cu130 .      for CUDA 13.0; run it with --gpus all
# docker run --rm --user "$(id -u)" -v "$PWD:/data" fips compress model small-model
FROM python:3.11-slim

# One of uv's --torch-backend names.
ARG TORCH=cpu

WORKDIR /opt/fips
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY fips fips
RUN pip install --no-cache-dir uv \
    && uv pip install --system --no-cache --torch-backend "$TORCH" -c constraints.txt '.[vision]' \
    && pip uninstall --yes uv \
    && useradd --create-home fips

USER fips
WORKDIR /data
ENTRYPOINT ["fips"]
