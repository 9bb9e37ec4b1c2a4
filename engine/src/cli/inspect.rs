//! `mixquant-engine inspect`: says what a folder is, a model or an artifact.

use std::path::PathBuf;

use clap::Args;

use crate::error::Result;
use crate::{inspect, job};

/// What `inspect` needs to know.
#[derive(Debug, Clone, Args)]
pub struct Arguments {
    /// A model's or an artifact's folder.
    #[arg(value_name = "DIR")]
    pub directory: PathBuf,
    /// Print one JSON object.
    #[arg(long)]
    pub json: bool,
}

/// Looks and prints.
///
/// # Errors
/// A folder that is neither, or damaged.
pub fn run(arguments: &Arguments) -> Result<()> {
    let description = inspect::describe(&arguments.directory)?;
    job::print(&if arguments.json {
        description.json()
    } else {
        description.table()
    })
}
