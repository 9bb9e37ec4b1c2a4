//! See `entries::tokenizer_json`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mixquant_fuzz::tokenizer_json(bytes));
