//! See `entries::quantization_config`.
#![no_main]

libfuzzer_sys::fuzz_target!(|bytes: &[u8]| mixquant_fuzz::quantization_config(bytes));
