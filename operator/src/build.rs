//! From decisions to Kubernetes objects: the only place that knows what a Job, a Deployment or a Service of a service looks like.
//!
//! Called by `plan` (names and digests are made from the rendered template) and by `apply` and `observe`. Pure: no client, no clock.
//! Two renderings of the same decision are equal byte for byte, or a revision would change by itself.

pub mod companion;
pub mod deployment;
pub mod job;
pub mod meta;
pub mod monitoring;
pub mod route;
pub mod service;
pub mod source;
