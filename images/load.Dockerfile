# The load generator of the demo. Build context: a folder that holds the release binary (images/build makes it).
FROM docker.io/library/debian:bookworm-slim
COPY --chmod=0755 mixquant-load /usr/local/bin/mixquant-load
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/mixquant-load"]
