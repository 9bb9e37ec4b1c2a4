//! See `entries::gguf`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mixquant_fuzz::gguf(bytes));
