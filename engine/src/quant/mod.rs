//! Quantised forms of weights and activations: what the bits mean, how they are made, and their exact read-back.
//!
//! Nothing here is fast: the kernels read the same layouts and are tested against this code.

pub mod affine;
pub mod fp8;
pub mod linears;
pub mod lut;
pub mod nest;
pub mod round;
pub mod scheme;
pub mod weight;

pub use fp8::{f32_to_fp8, fp8_to_f32};
pub use linears::{QuantisedLinear, QuantisedLinears};
pub use round::round_to_nearest;
pub use scheme::{ActivationFormat, Scheme, WeightFormat};
pub use weight::{Codes, QuantisedWeight};
