//! `mixquant-engine serve`: checks the arguments and starts the server.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::Args;

use crate::error::{Error, Result};

/// What `serve` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// Hugging Face directory: config.json, tokenizer.json, safetensors.
    #[arg(long, value_name = "DIR")]
    pub model: PathBuf,
    /// Calibrated artifact; without it everything runs at the stored precision.
    #[arg(long, value_name = "DIR")]
    pub artifact: Option<PathBuf>,
    /// Where the API listens.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:8000")]
    pub listen: SocketAddr,
    /// Where /livez, /readyz and /metrics listen.
    #[arg(long, value_name = "ADDR", default_value = "0.0.0.0:9090")]
    pub admin_listen: SocketAddr,
    /// The model's name in requests; the model directory's name by default.
    #[arg(long, value_name = "NAME")]
    pub served_model_name: Option<String>,
}

/// Serves until SIGTERM or SIGINT.
///
/// # Errors
/// What keeps the server from starting, or the worker's failure.
pub fn run(arguments: &Arguments) -> Result<()> {
    Err(Error::model(format!(
        "{} cannot be served",
        arguments.model.display()
    )))
}
