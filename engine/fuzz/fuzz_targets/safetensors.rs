//! See `entries::safetensors`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mixquant_fuzz::safetensors(bytes));
