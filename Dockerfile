# The suite in its locked environment, built from a clone:
#   docker build --tag relinear .
#   docker run --rm --volume "$PWD/results:/relinear/results" relinear make table2 CONFIG=scale=smoke
# With `--build-arg PIP_INDEX_URL=...` as pip has it: a build of torch for the CPU alone, for one.
FROM python:3.11-slim

# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends git make \
    && rm -rf /var/lib/apt/lists/*

WORKDIR /relinear
ARG PIP_INDEX_URL
ARG PIP_EXTRA_INDEX_URL

# The packages first, which change less often than the code.
COPY Makefile pyproject.toml setup.py requirements.lock README.md LICENSE NOTICE ./
COPY src src
COPY kernels kernels
RUN make setup
COPY . .

ENV PATH=/relinear/.venv/bin:$PATH
CMD ["make", "table2"]
