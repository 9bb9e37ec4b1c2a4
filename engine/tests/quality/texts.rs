//! The texts and models that the tests of quality share.

use std::path::Path;

use mixquant_crds::VerifyReport;
use mixquant_engine::dataset::{Dataset, Window, sample};
use mixquant_engine::model::Model;
use mixquant_engine::progress::Progress;
use mixquant_engine::quality::{Candidate, Models, Row};
use mixquant_engine::tokenizer::Tokenizer;

use super::jobs;

/// `count` windows of a file that ships with the repository.
pub(crate) fn windows(file: &str, tokens: usize, count: usize) -> Vec<Window> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../e2e/data")
        .join(file);
    let tokenizer = Tokenizer::open(&jobs::model()).unwrap();
    let windows = Dataset::read(&path)
        .unwrap()
        .windows(&tokenizer, tokens)
        .unwrap();
    sample(file, windows, count).unwrap().0
}

pub(crate) fn calibration() -> Vec<Window> {
    windows("calibration.jsonl", 256, 16)
}

/// Texts that no quantiser has seen.
pub(crate) fn evaluation() -> Vec<Window> {
    windows("evaluation.txt", 256, 8)
}

/// The distances of these rows from FP32 on the evaluation texts.
pub(crate) fn distances(directory: &Path, rows: &[Row]) -> Vec<VerifyReport> {
    let mut model = Model::open(directory).unwrap();
    let calibration = calibration();
    let hidden = Progress::hidden();
    let candidates: Vec<Candidate> = rows
        .iter()
        .map(|row| Candidate::new(&mut model, &calibration, *row, &hidden).unwrap())
        .collect();
    let mut models = Models::open(directory).unwrap();
    models
        .distances(&candidates, &evaluation(), &hidden)
        .unwrap()
}
