//! Quantised forms of weights and activations: what the bits mean, how they are made, and their exact read-back.
//!
//! Nothing here is fast: the kernels read the same layouts and are tested against this code.

pub mod linears;
pub mod nest;
pub mod weight;

pub use linears::{QuantisedLinear, QuantisedLinears};
pub use weight::{Codes, QuantisedWeight};
