//! From an S3 server that checks signatures.

use std::collections::BTreeMap;

use mixquant_crds::FailureReason;

use super::server::{BUCKET, Fault, Seen, Server};
use super::*;

#[test]
fn a_model_in_shards_arrives_whole_and_a_second_run_reads_nothing() {
    let (server, uri) = bucket_with(&sharded());
    let cache = Cache::new();
    let mut options = cache.options(&server, uri);
    options.range = 1 << 20;
    let first = bring(&options).unwrap();
    assert_eq!(first.digest, digest_of(&sharded()));
    assert_eq!(digest_of(&cache.model()), first.digest);
    assert!(!first.reused && first.files == 7, "{first:?}");
    assert!(
        !cache.model().join("README.md").exists(),
        "what the engine does not read is left there"
    );
    let (reads, requests) = (server.reads(), server.requests());
    let second = bring(&options).unwrap();
    assert!(second.reused && second.bytes == first.bytes, "{second:?}");
    assert_eq!(
        server.reads(),
        reads + 1,
        "only the index is read, to know which files there are"
    );
    assert!(server.requests() > requests);
    options.digest = Some(first.digest);
    let requests = server.requests();
    assert!(bring(&options).unwrap().reused);
    assert_eq!(
        server.requests(),
        requests,
        "a pinned model that is there asks nobody"
    );
}

/// Every second read of each file: a read that is tried again succeeds, whatever else runs beside it.
fn every_second(fault: Fault) -> impl FnMut(&Seen) -> Fault {
    let mut reads: BTreeMap<String, usize> = BTreeMap::new();
    move |seen| {
        let read = reads.entry(seen.path.clone()).or_default();
        *read += 1;
        if *read % 2 == 1 { fault } else { Fault::None }
    }
}

#[test]
fn a_transfer_that_breaks_off_goes_on_behind_the_last_whole_range() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    server.when(every_second(Fault::Cut(4_000)));
    assert_eq!(bring(&options).unwrap().digest, digest_of(&small()));
    let size = std::fs::metadata(small().join("model.safetensors"))
        .unwrap()
        .len();
    assert!(
        server.bytes() < 2 * size,
        "{} bytes were sent for {size}",
        server.bytes()
    );
}

#[test]
fn a_run_that_gave_up_leaves_no_model_and_the_next_keeps_its_ranges() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    server.when(|seen| {
        if seen.number < 4 {
            Fault::None
        } else {
            Fault::Cut(100)
        }
    });
    let error = bring(&options).unwrap_err();
    assert_eq!(error.reason, FailureReason::SourceUnavailable);
    assert!(error.message.contains("run it again to go on"), "{error}");
    assert!(!cache.model().exists());
    let before = server.bytes();
    server.when(|_| Fault::None);
    bring(&options).unwrap();
    let size: u64 = ["model.safetensors", "config.json"]
        .map(|name| std::fs::metadata(small().join(name)).unwrap().len())
        .iter()
        .sum();
    assert!(
        server.bytes() - before < size - 2 * options.range,
        "whole ranges are not read again"
    );
    assert_eq!(digest_of(&cache.model()), digest_of(&small()));
}

#[test]
fn a_server_that_is_busy_or_falls_silent_is_asked_again() {
    for fault in [
        Fault::Status(503),
        Fault::Status(500),
        Fault::Status(429),
        Fault::Hold(10),
    ] {
        let (server, uri) = bucket_with(&small());
        let cache = Cache::new();
        server.when(every_second(fault));
        let brought = bring(&cache.options(&server, uri));
        assert_eq!(brought.unwrap().digest, digest_of(&small()), "{fault:?}");
    }
    let (server, uri) = bucket_with(&small());
    server.when(|_| Fault::Status(503));
    let error = bring(&Cache::new().options(&server, uri)).unwrap_err();
    assert_eq!(error.reason, FailureReason::SourceUnavailable);
    assert!(error.message.contains("503"), "{error}");
}

#[test]
fn an_object_that_changes_in_the_middle_is_noticed_and_never_mixed() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    let object = server
        .root
        .path()
        .join(BUCKET)
        .join("team/model/model.safetensors");
    let original = std::fs::read(&object).unwrap();
    let mut other = original.clone();
    *other.last_mut().unwrap() ^= 1;
    let changed = other.clone();
    let path = object.clone();
    server.when(move |seen| {
        if seen.number == 3 {
            std::fs::write(&path, &changed).unwrap();
        }
        Fault::None
    });
    let error = bring(&options).unwrap_err();
    assert_eq!(error.reason, FailureReason::SourceUnavailable);
    assert!(
        error.message.contains("changed while it was read"),
        "{error}"
    );
    assert!(!cache.model().exists());
    bring(&options).unwrap();
    assert_eq!(
        std::fs::read(cache.model().join("model.safetensors")).unwrap(),
        other
    );
}

#[test]
fn a_truncated_or_missing_object_is_named() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let folder = server.root.path().join(BUCKET).join("team/model");
    let weights = std::fs::read(folder.join("model.safetensors")).unwrap();
    std::fs::write(
        folder.join("model.safetensors"),
        &weights[..weights.len() / 2],
    )
    .unwrap();
    let error = bring(&cache.options(&server, uri)).unwrap_err();
    assert_eq!(error.reason, FailureReason::ModelInvalid);
    assert!(
        error.message.contains("model.safetensors") && error.message.contains("truncated"),
        "{error}"
    );
    assert!(!cache.model().exists());
    // Mended at the source, the next run takes the new one.
    std::fs::write(folder.join("model.safetensors"), &weights).unwrap();
    assert_eq!(
        bring(&cache.options(&server, uri)).unwrap().digest,
        digest_of(&small())
    );

    let (server, uri) = bucket_with(&sharded());
    let shard = "model-00002-of-00002.safetensors";
    std::fs::remove_file(
        server
            .root
            .path()
            .join(BUCKET)
            .join("team/model")
            .join(shard),
    )
    .unwrap();
    let error = bring(&Cache::new().options(&server, uri)).unwrap_err();
    assert_eq!(error.reason, FailureReason::SourceRefused);
    assert!(
        error
            .message
            .contains(&format!("{uri}/{shard}: it does not exist")),
        "{error}"
    );
}

#[test]
fn wrong_credentials_a_wrong_bucket_and_an_empty_folder_say_what_to_do() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let as_nobody = |uri: &str, key: Option<&str>| {
        let key = key.map(str::to_owned);
        let secret = key.as_ref().map(|_| "wrong".to_owned());
        fetch::run(
            &cache.options(&server, uri),
            &Progress::hidden(),
            &|name| match name {
                "AWS_ACCESS_KEY_ID" => key.clone(),
                "AWS_SECRET_ACCESS_KEY" => secret.clone(),
                _ => None,
            },
        )
        .unwrap_err()
    };
    let wrong = as_nobody(uri, Some(KEY));
    assert_eq!(wrong.reason, FailureReason::SourceRefused);
    assert!(
        wrong
            .message
            .contains(&format!("access is denied (with AWS_ACCESS_KEY_ID {KEY})")),
        "{wrong}"
    );
    assert!(!wrong.message.contains("wrong\""), "{wrong}");
    let none = as_nobody(uri, None);
    assert!(
        none.message
            .contains("no credentials are given: the Secret would have AWS_ACCESS_KEY_ID"),
        "{none}"
    );
    let bucket = bring(&cache.options(&server, "s3://others/model")).unwrap_err();
    assert_eq!(bucket.reason, FailureReason::SourceRefused, "{bucket}");
    assert!(
        bucket
            .message
            .contains("check the URI, the endpoint and the region"),
        "{bucket}"
    );
    let empty = bring(&cache.options(&server, "s3://models/team")).unwrap_err();
    assert_eq!(empty.reason, FailureReason::ModelInvalid);
    assert!(
        empty.message.contains("must name a model's own folder"),
        "{empty}"
    );
    assert!(!cache.model().exists());
}

#[test]
fn a_model_of_another_digest_is_refused_and_not_kept() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let mut options = cache.options(&server, uri);
    options.digest = Some(Digest::of_bytes(b"another"));
    let error = bring(&options).unwrap_err();
    assert_eq!(error.reason, FailureReason::DigestMismatch);
    assert!(
        error.message.contains(digest_of(&small()).as_str()),
        "{error}"
    );
    assert!(!cache.model().exists());
    options.digest = Some(digest_of(&small()));
    let read = server.bytes();
    bring(&options).unwrap();
    assert!(
        server.bytes() - read > 50_000,
        "bytes of a wrong model are fetched anew"
    );
}

#[test]
fn two_at_once_bring_one_model_and_read_it_once() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let mut options = cache.options(&server, uri);
    options.digest = Some(digest_of(&small()));
    let brought: Vec<Fetched> = std::thread::scope(|scope| {
        let runs: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| bring(&options).unwrap()))
            .collect();
        runs.into_iter().map(|run| run.join().unwrap()).collect()
    });
    assert_eq!(brought.iter().filter(|brought| !brought.reused).count(), 1);
    assert!(
        server.bytes() < 60_000,
        "{} bytes were read",
        server.bytes()
    );
    assert_eq!(digest_of(&cache.model()), digest_of(&small()));
}

#[test]
fn a_new_version_at_the_source_takes_the_old_ones_place_only_when_it_is_whole() {
    let (server, uri) = bucket_with(&small());
    let cache = Cache::new();
    let options = cache.options(&server, uri);
    let old = bring(&options).unwrap().digest;
    let config = server
        .root
        .path()
        .join(BUCKET)
        .join("team/model/config.json");
    let text = std::fs::read_to_string(&config).unwrap();
    std::fs::write(&config, format!("{text} ")).unwrap();
    server.when(|seen| {
        if seen.path.ends_with("config.json") {
            Fault::Status(403)
        } else {
            Fault::None
        }
    });
    assert!(bring(&options).is_err());
    assert_eq!(digest_of(&cache.model()), old);
    server.when(|_| Fault::None);
    let new = bring(&options).unwrap();
    assert!(new.digest != old && !new.reused);
    assert_eq!(digest_of(&cache.model()), new.digest);
}

#[test]
fn a_disk_that_takes_nothing_is_named_with_the_fix() {
    let (server, uri) = bucket_with(&small());
    let mut options = Cache::new().options(&server, uri);
    options.to = "/proc/model".into();
    let error = bring(&options).unwrap_err();
    assert_eq!(error.reason, FailureReason::StorageFailed);
    assert!(
        error
            .message
            .contains("cannot write the model below /proc/model"),
        "{error}"
    );
}

#[test]
fn one_gguf_file_is_a_source_of_its_own() {
    let server = Server::s3();
    let gguf = small().with_file_name("model-gguf-llama");
    server.put(&gguf, &format!("{BUCKET}/gguf"));
    let mut names = std::fs::read_dir(&gguf)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension()
                .is_some_and(|extension| extension == "gguf")
        });
    let name = names.next().unwrap();
    let name = name.file_name().unwrap().to_str().unwrap();
    for uri in [
        format!("s3://models/gguf/{name}"),
        "s3://models/gguf".to_owned(),
    ] {
        let brought = bring(&Cache::new().options(&server, &uri)).unwrap();
        assert_eq!(brought.files, 1, "{uri}");
        assert_eq!(brought.digest, digest_of(&gguf.join(name)), "{uri}");
    }
}
