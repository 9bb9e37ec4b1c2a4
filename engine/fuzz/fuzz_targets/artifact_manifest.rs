//! See `entries::artifact_manifest`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mixquant_fuzz::artifact_manifest(bytes));
