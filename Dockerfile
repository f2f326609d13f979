# docker build -t fips .
# docker run --rm --user "$(id -u)" -v "$PWD:/data" fips compress model small-model
FROM python:3.11-slim

WORKDIR /opt/fips
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY fips fips
RUN pip install --no-cache-dir -c constraints.txt . \
    && useradd --create-home fips

USER fips
WORKDIR /data
ENTRYPOINT ["fips"]
