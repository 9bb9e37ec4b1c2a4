# The operator. Build context: a folder that holds the release binary (images/build makes it). No RUN line, so that no shell is needed to build it.
FROM docker.io/library/debian:bookworm-slim
COPY --chmod=0755 mixquant-operator /usr/local/bin/mixquant-operator
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/mixquant-operator"]
