# The engine: serves a model, and runs calibration and verification as a Job.
# Build context: a folder that holds the release binary (images/build makes it). No RUN line, so that no shell is needed to build it.
FROM docker.io/library/debian:bookworm-slim
COPY --chmod=0755 mixquant-engine /usr/local/bin/mixquant-engine
USER 65532:65532
EXPOSE 8000 9090
ENTRYPOINT ["/usr/local/bin/mixquant-engine"]
