//! `mixquant-engine fetch`: brings a model into a folder and prints what it is as one JSON object.

use std::path::PathBuf;

use clap::Args;
use mixquant_crds::Digest;

use crate::error::Result;
use crate::fetch::{self, Address, CONNECTIONS, Options, Patience, RANGE_BYTES};
use crate::job;

/// What `fetch` needs to know. Credentials are read from the environment: `AWS_ACCESS_KEY_ID` and `AWS_SECRET_ACCESS_KEY`, and so on.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// A folder in Hugging Face layout, or a GGUF file: s3://, gs://, az://, https:// or http://.
    #[arg(long, value_name = "URI")]
    pub source: String,
    /// The folder that will be the model's. One that is whole is left alone.
    #[arg(long, value_name = "DIR")]
    pub to: PathBuf,
    /// Refuse any other model; as `inspect` prints it.
    #[arg(long, value_name = "DIGEST")]
    pub digest: Option<Digest>,
    /// Another server than the provider's own, such as `http://minio.storage:9000`.
    #[arg(long, value_name = "URL")]
    pub endpoint: Option<String>,
    /// Of an S3 bucket; us-east-1 by default.
    #[arg(long, value_name = "NAME")]
    pub region: Option<String>,
    /// Files at once.
    #[arg(long, value_name = "N", default_value_t = CONNECTIONS, value_parser = clap::value_parser!(u16).range(1..=64))]
    pub connections: u16,
    /// What a broken connection costs at most.
    #[arg(long, value_name = "BYTES", default_value_t = RANGE_BYTES, value_parser = clap::value_parser!(u64).range(1..))]
    pub range_bytes: u64,
    /// Where the reason of a failure is left for the operator.
    #[arg(long, value_name = "PATH")]
    pub termination_message: Option<PathBuf>,
}

/// Fetches and prints.
///
/// # Errors
/// What the source, the disk or the digest refuses.
pub fn run(arguments: &Arguments) -> Result<()> {
    let options = Options {
        from: Address {
            uri: arguments.source.clone(),
            endpoint: arguments.endpoint.clone(),
            region: arguments.region.clone(),
        },
        to: arguments.to.clone(),
        digest: arguments.digest.clone(),
        connections: usize::from(arguments.connections),
        range: arguments.range_bytes,
        patience: Patience::default(),
    };
    let work = |progress: &_| fetch::run(&options, progress, &|name| std::env::var(name).ok());
    let fetched = job::run_step(arguments.termination_message.as_deref(), work)?;
    job::print(&serde_json::to_string(&fetched).expect("facts are strings and numbers"))
}
