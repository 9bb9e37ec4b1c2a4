//! The small endpoints: which model, which tokens, which text.

use std::sync::Arc;
use std::time::Instant;

use axum::Json;
use axum::body::Body;
use axum::extract::{Path, State};
use axum::http::Request as HttpRequest;
use axum::response::Response;
use serde_json::{Value, json};

use crate::tokenizer::Special;

use super::body::read_body;
use super::error::ApiError;
use super::fields::Fields;
use super::request::{parse_messages, token_ids};
use super::{App, admin};

/// `GET /v1/models`.
pub(super) async fn models(State(app): State<Arc<App>>) -> Json<Value> {
    Json(json!({"object": "list", "data": [described(&app)]}))
}

/// `GET /v1/models/NAME`; a name may have slashes.
pub(super) async fn model(
    State(app): State<Arc<App>>,
    Path(name): Path<String>,
) -> Result<Json<Value>, ApiError> {
    if name == app.model_name {
        Ok(Json(described(&app)))
    } else {
        Err(app.unknown_model(&name))
    }
}

fn described(app: &App) -> Value {
    json!({
        "id": app.model_name,
        "object": "model",
        "created": app.created,
        "owned_by": "mixquant",
        "max_model_len": app.bounds.max_sequence_length,
    })
}

/// `POST /tokenize`: a `prompt` or `messages` to ids.
pub(super) async fn tokenize(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::parse(&read_body(request).await?)?;
    app.check_model(&mut fields)?;
    let text = fields.string("prompt")?;
    let messages = fields.take("messages").map(parse_messages).transpose()?;
    let special = match fields.take("add_special_tokens") {
        None | Some(Value::Bool(true)) => Special::Add,
        Some(Value::Bool(false)) => Special::None,
        Some(_) => {
            return Err(ApiError::field(
                "add_special_tokens",
                "`add_special_tokens` must be true or false",
            ));
        }
    };
    let names = fields.boolean("return_token_strs")?;
    fields.neutral(&[("add_generation_prompt", &[json!(true)])])?;
    fields.finish("")?;
    let worker = app.clone();
    let ids = tokio::task::spawn_blocking(move || match (text, messages) {
        (Some(text), None) => {
            worker.check_text("prompt", text.len())?;
            Ok(worker.tokenizer.encode(&text, special)?)
        }
        (None, Some(messages)) => {
            worker.check_text(
                "messages",
                messages.iter().map(|message| message.content.len()).sum(),
            )?;
            Ok(worker.tokenizer.encode_chat(&messages)?)
        }
        _ => Err(ApiError::field(
            "prompt",
            "give either `prompt` or `messages`",
        )),
    });
    let ids = ids
        .await
        .map_err(|_| ApiError::internal("the tokenizer failed on this text"))??;
    let mut body =
        json!({"count": ids.len(), "max_model_len": app.bounds.max_sequence_length, "tokens": ids});
    if names {
        body["token_strs"] = ids
            .iter()
            .map(|id| app.tokenizer.decode_all(&[*id]))
            .collect();
    }
    Ok(Json(body))
}

/// `POST /detokenize`: ids to a text with control tokens written out.
pub(super) async fn detokenize(
    State(app): State<Arc<App>>,
    request: HttpRequest<Body>,
) -> Result<Json<Value>, ApiError> {
    let mut fields = Fields::parse(&read_body(request).await?)?;
    app.check_model(&mut fields)?;
    let Some(Value::Array(list)) = fields.take("tokens") else {
        return Err(ApiError::field(
            "tokens",
            "`tokens` must be a list of token ids",
        ));
    };
    fields.finish("")?;
    let ids = token_ids(&list, "tokens", app.bounds)?;
    Ok(Json(json!({"prompt": app.tokenizer.decode_all(&ids)})))
}

/// `GET /health`: the readiness of the admin port, for tools that look here.
pub(super) async fn health(State(app): State<Arc<App>>) -> Response {
    admin::probe(app.health.ready(Instant::now()))
}
