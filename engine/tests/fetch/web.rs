//! From a plain web server, which cannot list.

use std::sync::{Arc, Mutex};

use mixquant_crds::FailureReason;

use super::server::{Fault, Server};
use super::*;

#[test]
fn a_web_servers_model_is_found_by_the_names_that_models_have() {
    let server = Server::web();
    server.put(&sharded(), "org/model/main");
    let cache = Cache::new();
    let mut options = cache.options(&server, &format!("{}/org/model/main", server.address));
    options.range = 4 << 20;
    let brought = bring(&options).unwrap();
    assert_eq!((brought.digest, brought.files), (digest_of(&sharded()), 7));
    assert!(bring(&options).unwrap().reused);
}

#[test]
fn redirects_are_followed_as_model_hubs_send_them_and_the_token_stays_with_its_host() {
    let (hub, store) = (Server::web(), Server::web());
    store.put(&small(), "m");
    let seen = Arc::new(Mutex::new(Vec::new()));
    for server in [&hub, &store] {
        let (seen, host) = (Arc::clone(&seen), server.host().to_owned());
        server.when(move |read| {
            let mut seen = seen.lock().unwrap();
            seen.push((host.clone(), read.authorization.clone()));
            Fault::None
        });
    }
    let cache = Cache::new();
    let uri = format!("{}/moved/{}/m", hub.address, store.host());
    let token = |name: &str| (name == "BEARER_TOKEN").then(|| "hf_token\n".to_owned());
    let brought = fetch::run(&cache.options(&hub, &uri), &Progress::hidden(), &token).unwrap();
    assert_eq!(brought.digest, digest_of(&small()));
    let seen = seen.lock().unwrap();
    assert!(seen.iter().any(|(host, _)| host == store.host()));
    for (host, token) in seen.iter() {
        let expected = (host == hub.host()).then_some("Bearer hf_token");
        assert_eq!(token.as_deref(), expected, "{host}");
    }
}

#[test]
fn what_a_web_server_refuses_is_said_with_the_fix() {
    let server = Server::web();
    server.put(&small(), "m");
    let cache = Cache::new();
    let options = cache.options(&server, &format!("{}/m", server.address));
    server.when(|_| Fault::Status(403));
    let denied = bring(&options).unwrap_err();
    assert_eq!(denied.reason, FailureReason::SourceRefused);
    assert!(
        denied
            .message
            .contains("the Secret would have BEARER_TOKEN"),
        "{denied}"
    );
    let missing = bring(&cache.options(&server, &format!("{}/n", server.address))).unwrap_err();
    assert_eq!(missing.reason, FailureReason::ModelInvalid);
    let closed = Server::web();
    let address = closed.address.clone();
    drop(closed);
    let nobody = bring(&cache.options(&server, &format!("{address}/m"))).unwrap_err();
    assert_eq!(nobody.reason, FailureReason::SourceUnavailable, "{nobody}");
}
