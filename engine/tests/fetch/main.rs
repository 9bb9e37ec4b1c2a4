//! `fetch` against servers on loopback that refuse, cut, hold and change: what arrives is the model, whole and once, or a reason.
#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod killed;
mod s3;
mod server;
mod web;

use std::path::{Path, PathBuf};
use std::time::Duration;

use mixquant_crds::Digest;
use mixquant_engine::fetch::{self, Address, Fetched, Options, Patience};
use mixquant_engine::progress::Progress;
use mixquant_engine::{Result, model};

use self::server::{BUCKET, KEY, SECRET, Server};

/// A model of 51 kB in one file.
fn small() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/goldens/llama")
}

/// A model of 25 MB in two shards, with an index and a tokenizer.
fn sharded() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/models/kube-llama-10m")
}

fn digest_of(model: &Path) -> Digest {
    model::digest_of(model).unwrap()
}

/// Somewhere to fetch to, that goes with the test.
struct Cache {
    folder: tempfile::TempDir,
}

impl Cache {
    fn new() -> Self {
        Self {
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn model(&self) -> PathBuf {
        self.folder.path().join("model")
    }

    fn options(&self, server: &Server, uri: &str) -> Options {
        Options {
            from: Address {
                uri: uri.into(),
                endpoint: uri.starts_with("s3://").then(|| server.address.clone()),
                region: None,
            },
            to: self.model(),
            digest: None,
            connections: 3,
            range: 8 << 10,
            patience: Patience {
                retries: 2,
                first_pause: Duration::from_millis(1),
                stall: Duration::from_millis(300),
            },
        }
    }
}

fn as_owner(name: &str) -> Option<String> {
    match name {
        "AWS_ACCESS_KEY_ID" => Some(KEY.into()),
        "AWS_SECRET_ACCESS_KEY" => Some(SECRET.into()),
        _ => None,
    }
}

fn bring(options: &Options) -> Result<Fetched> {
    fetch::run(options, &Progress::hidden(), &as_owner)
}

/// An S3 server with a model at `s3://models/team/model`.
fn bucket_with(model: &Path) -> (Server, &'static str) {
    let server = Server::s3();
    server.put(model, &format!("{BUCKET}/team/model"));
    (server, "s3://models/team/model")
}
