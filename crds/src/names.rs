//! Every name that two programs must agree on: labels, annotations, ports, file names, exit codes and metric names.

/// The API group, also the prefix of labels and annotations.
pub const GROUP: &str = "mixquant.io";

/// On every object and pod of a service: the service's name.
pub const LABEL_SERVICE: &str = "mixquant.io/service";
/// On pods, Deployments and metrics of a revision: the short revision digest. The track (stable or canary) is a role and never a label.
pub const LABEL_REVISION: &str = "mixquant.io/revision";
/// `engine`, `calibration` or `verification`.
pub const LABEL_COMPONENT: &str = "app.kubernetes.io/component";
/// Always [`APP_NAME`].
pub const LABEL_APP_NAME: &str = "app.kubernetes.io/name";
/// The service's name again, for tools that group by it.
pub const LABEL_APP_INSTANCE: &str = "app.kubernetes.io/instance";
/// Always [`MANAGER`].
pub const LABEL_MANAGED_BY: &str = "app.kubernetes.io/managed-by";
/// On a service, written by people: the newest [`Request`](crate::request::Request) of a rollout, answered in `status.request`.
pub const ANNOTATION_REQUEST: &str = "mixquant.io/request";
/// The value of [`LABEL_APP_NAME`].
pub const APP_NAME: &str = "mixquant";
/// Field manager of server-side apply and value of [`LABEL_MANAGED_BY`].
pub const MANAGER: &str = "mixquant-operator";

/// Engine: the OpenAI-compatible API.
pub const PORT_API: u16 = 8000;
/// Engine: `/livez`, `/readyz`, `/metrics`, and [`PROBE_PATH`].
pub const PORT_ADMIN: u16 = 9090;
/// Engine, on the admin port: answers a [`ProbeRequest`](crate::probe::ProbeRequest).
pub const PROBE_PATH: &str = "/probe";
/// The names of these ports in pods and Services.
pub const PORT_API_NAME: &str = "http";
/// See [`PORT_ADMIN`].
pub const PORT_ADMIN_NAME: &str = "admin";

/// The environment variable by which an engine pod learns its revision, from its own label: as an argument it would be part of the template
/// that it is the digest of.
pub const ENV_REVISION: &str = "MIXQUANT_REVISION";

/// Where pods find the model volume (read-only).
pub const MOUNT_MODELS: &str = "/models";
/// Where pods find the artifact volume.
pub const MOUNT_ARTIFACTS: &str = "/artifacts";
/// Where Jobs find the calibration data: `/data/calibration/<key>`.
pub const MOUNT_CALIBRATION: &str = "/data/calibration";
/// Where Jobs find the evaluation data.
pub const MOUNT_EVALUATION: &str = "/data/evaluation";
/// Where a container leaves its [`JobMessage`](crate::report::JobMessage).
pub const TERMINATION_MESSAGE_PATH: &str = "/dev/termination-log";

/// Exit code: nothing to say.
pub const EXIT_OK: i32 = 0;
/// Exit code: something that another try may cure (I/O, storage).
pub const EXIT_RETRY: i32 = 1;
/// Exit code: the input is wrong, another try gives the same answer.
pub const EXIT_INPUT: i32 = 2;

/// Artifact folder: schema version, model digest, files with their digests.
pub const ARTIFACT_MANIFEST: &str = "manifest.json";
/// Artifact folder: the [`PrecisionPlan`](crate::precision::PrecisionPlan).
pub const ARTIFACT_PLAN: &str = "plan.json";
/// Artifact folder: importance thresholds per layer and KV head.
pub const ARTIFACT_ATTENTION: &str = "attention.json";
/// Artifact folder: the first answers of a healthy engine, compared before pods are ready.
pub const ARTIFACT_GOLDEN: &str = "golden.json";
/// Artifact folder: what calibration saw of activations, keys and values, against which drift is counted.
pub const ARTIFACT_RANGES: &str = "ranges.json";
/// Artifact folder: texts whose answers are known, for probes of a canary and of stable.
pub const ARTIFACT_PROBE: &str = "probe.json";
/// Artifact folder: the [`CalibrationReport`](crate::report::CalibrationReport); not part of the digest.
pub const ARTIFACT_REPORT: &str = "report.json";
/// Artifact folder: one empty file for each service that had it made, named like the service.
pub const ARTIFACT_OWNERS: &str = "owners";
/// Artifact folder: quantised tensors.
pub const ARTIFACT_WEIGHTS: &str = "weights";

/// Where `fetch` finds credentials: keys of a Secret and variables of the same names, by kind of source.
pub mod fetch_environment {
    /// `s3://`: the key's name.
    pub const AWS_ACCESS_KEY_ID: &str = "AWS_ACCESS_KEY_ID";
    /// `s3://`: the key.
    pub const AWS_SECRET_ACCESS_KEY: &str = "AWS_SECRET_ACCESS_KEY";
    /// `s3://`: the token of a key for a time.
    pub const AWS_SESSION_TOKEN: &str = "AWS_SESSION_TOKEN";
    /// `gs://`: a service account's key file, as JSON.
    pub const GOOGLE_SERVICE_ACCOUNT_KEY: &str = "GOOGLE_SERVICE_ACCOUNT_KEY";
    /// `az://`: the storage account.
    pub const AZURE_STORAGE_ACCOUNT_NAME: &str = "AZURE_STORAGE_ACCOUNT_NAME";
    /// `az://`: its key, in Base64.
    pub const AZURE_STORAGE_ACCOUNT_KEY: &str = "AZURE_STORAGE_ACCOUNT_KEY";
    /// `az://`: or a shared access signature.
    pub const AZURE_STORAGE_SAS_TOKEN: &str = "AZURE_STORAGE_SAS_TOKEN";
    /// `https://`: sent as `Authorization: Bearer`.
    pub const BEARER_TOKEN: &str = "BEARER_TOKEN";
}

/// Metric names of the engine. Own series start with `mixquant_`, base unit last; the `vllm:` names are always exported too.
pub mod engine_metrics {
    /// Histogram, seconds from arrival to the first token.
    pub const TIME_TO_FIRST_TOKEN: &str = "mixquant_time_to_first_token_seconds";
    /// Histogram, one observation a request of two tokens and more: (end-to-end - TTFT) / (output tokens - 1).
    pub const REQUEST_TIME_PER_OUTPUT_TOKEN: &str =
        "mixquant_request_time_per_output_token_seconds";
    /// Histogram, one observation a token: the gap to the token before.
    pub const INTER_TOKEN_LATENCY: &str = "mixquant_inter_token_latency_seconds";
    /// Histogram, seconds from arrival to the last token.
    pub const E2E_REQUEST_LATENCY: &str = "mixquant_e2e_request_latency_seconds";
    /// Gauge, sequences that are being computed.
    pub const REQUESTS_RUNNING: &str = "mixquant_requests_running";
    /// Gauge, sequences that wait.
    pub const REQUESTS_WAITING: &str = "mixquant_requests_waiting";
    /// Gauge, 0 to 1.
    pub const KV_CACHE_USAGE: &str = "mixquant_kv_cache_usage_ratio";
    /// Gauge, bytes of stored keys and values, by `tier`.
    pub const KV_CACHE_BYTES: &str = "mixquant_kv_cache_bytes";
    /// Counter, prompts by `precision` (`W8A8`, `BF16`, `FP32`) of what was decoded from and `reason` (`length`, `short`, `plan`, `fallback`).
    pub const PREFILL_PRECISION: &str = "mixquant_prefill_precision";
    /// Counter, prompts that the safety valve had read again precisely, by `reason` (`nan`, `top1`, `kl`, `audit`).
    pub const VALVE_FALLBACK: &str = "mixquant_valve_fallback";
    /// Histogram, nats, one observation a checked prompt: KL(precise ‖ quantised) of the last prompt token over the same cache.
    pub const FIRST_TOKEN_KL: &str = "mixquant_first_token_kl";
    /// Counter, checked prompts by `agreement` of the most likely token (`same`, `tie`, `different`).
    pub const TOP1_AGREEMENT: &str = "mixquant_top1_agreement";
    /// Histogram, nats, one observation an audited prompt: KL(full precise prefill ‖ what the valve let pass).
    pub const SHADOW_AUDIT_KL: &str = "mixquant_shadow_audit_kl";
    /// Counter, records of the difference log by `outcome` (`written`, `dropped`).
    pub const DIFFERENCE_RECORDS: &str = "mixquant_difference_records";
    /// Counter, steps whose logits were no finite numbers, those that the valve caught included.
    pub const NAN_LOGITS: &str = "mixquant_nan_logits";
    /// Gauge, bytes of weights in memory by `copy` (`precise`, `quantised`, `scratch`).
    pub const WEIGHT_BYTES: &str = "mixquant_weight_bytes";
    /// Gauge, prompts of so many tokens and more are read by the quantised copy; 0 where none is.
    pub const PREFILL_MIN_PROMPT_TOKENS: &str = "mixquant_prefill_min_prompt_tokens";
    /// Counter, rows that linears read while prompts were read (one a token, layer and place), by `input` (`attention`, `output`,
    /// `feed_forward`, `down`).
    pub const ACTIVATION_ROWS: &str = "mixquant_activation_rows";
    /// Counter, those of them whose largest magnitude is beyond what calibration saw, by `input`.
    pub const ACTIVATION_ROWS_BEYOND_RANGE: &str = "mixquant_activation_rows_beyond_range";
    /// Counter, keys and values of prompts that the cache quantises (one a token, layer and KV head), by `row` (`key`, `value`).
    pub const KV_ROWS: &str = "mixquant_kv_rows";
    /// Counter, those of them whose scale is beyond what calibration saw, or saturates, by `row`.
    pub const KV_ROWS_BEYOND_RANGE: &str = "mixquant_kv_rows_beyond_range";
    /// Histogram, tokens, one observation a prompt.
    pub const REQUEST_PROMPT_TOKENS: &str = "mixquant_request_prompt_tokens";
    /// Counter, prompt tokens read.
    pub const PROMPT_TOKENS: &str = "mixquant_prompt_tokens";
    /// Counter, tokens generated.
    pub const GENERATION_TOKENS: &str = "mixquant_generation_tokens";
    /// Counter, requests by `outcome` (`ok`, `error`, `cancelled`, `rejected`).
    pub const REQUESTS: &str = "mixquant_requests";
    /// Counter, those of them that were probes and were answered.
    pub const PROBES: &str = "mixquant_probes";
    /// Gauge, always 1, labels `model_digest`, `artifact_digest`, `version`.
    pub const BUILD_INFO: &str = "mixquant_build_info";
    /// Gauge, seconds since the epoch: tells a restarted process from a continued one.
    pub const PROCESS_START_TIME: &str = "process_start_time_seconds";
    /// The names that dashboards and gateways know, with the own series each repeats.
    pub const VLLM_ALIASES: &[(&str, &str)] = &[
        ("vllm:time_to_first_token_seconds", TIME_TO_FIRST_TOKEN),
        (
            "vllm:request_time_per_output_token_seconds",
            REQUEST_TIME_PER_OUTPUT_TOKEN,
        ),
        ("vllm:inter_token_latency_seconds", INTER_TOKEN_LATENCY),
        ("vllm:e2e_request_latency_seconds", E2E_REQUEST_LATENCY),
        ("vllm:num_requests_running", REQUESTS_RUNNING),
        ("vllm:num_requests_waiting", REQUESTS_WAITING),
        ("vllm:kv_cache_usage_perc", KV_CACHE_USAGE),
        ("vllm:request_prompt_tokens", REQUEST_PROMPT_TOKENS),
    ];
}

/// The safety valve where a service says nothing about it.
pub mod valve_defaults {
    /// KL(precise ‖ quantised) of the first token at most, nats.
    pub const MAX_KL: f64 = 0.05;
    /// The precise top1-top2 logit margin from which on another most likely token is a breach.
    pub const MIN_MARGIN: f64 = 0.5;
    /// Percent of the quantised prompts that are also read precisely.
    pub const SHADOW_AUDIT_PERCENT: f64 = 1.0;
}

/// Metric names of the operator (counters get `_total` in the exposition).
pub mod operator_metrics {
    /// Gauge, always 1, labels `namespace`, `name`, `phase`.
    pub const SERVICE_INFO: &str = "mixquant_service_info";
    /// Gauge, percent of ready pods that are the canary's, labels `namespace`, `name`.
    pub const CANARY_WEIGHT: &str = "mixquant_canary_weight_percent";
    /// Gauge, engine pods of the stable revision that are wanted, labels `namespace`, `name`.
    pub const DESIRED_REPLICAS: &str = "mixquant_desired_replicas";
    /// Counter, labels `namespace`, `name`, `cause`.
    pub const ROLLBACKS: &str = "mixquant_rollbacks";
    /// Counter, labels `namespace`, `name`.
    pub const PROMOTIONS: &str = "mixquant_promotions";
    /// Counter, labels `namespace`, `name`, `signal`: bounds of `spec.drift` that traffic crossed.
    pub const DRIFTS: &str = "mixquant_drifts";
    /// Counter, labels `namespace`, `name`, `cause`.
    pub const RECALIBRATIONS: &str = "mixquant_recalibrations";
    /// Counter, labels `namespace`, `name`, `gate`, `verdict`.
    pub const VERDICTS: &str = "mixquant_verdicts";
    /// Histogram, seconds of one reconcile.
    pub const RECONCILE_DURATION: &str = "mixquant_operator_reconcile_duration_seconds";
    /// Counter, label `error` (the error's reason).
    pub const RECONCILE_ERRORS: &str = "mixquant_operator_reconcile_errors";
    /// Counter, labels `verb`, `kind`: every write to the API.
    pub const API_WRITES: &str = "mixquant_operator_api_writes";
    /// Gauge, 1 while this process leads.
    pub const LEADER: &str = "mixquant_operator_leader";
}
