//! The committed CRD manifests are what the types say. `UPDATE_EXPECT=1 cargo test -p mixquant-crds --features kube` rewrites them.

use std::path::{Path, PathBuf};
use std::{env, fs};

use kube::CustomResourceExt as _;
use mixquant_crds::MixQuantService;

const HEADER: &str =
    "# Generated from crds/src by `UPDATE_EXPECT=1 make check-generated`; do not edit.\n";

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .expect("the crate lies in the repository")
        .to_owned()
}

fn expected() -> String {
    let yaml = serde_norway::to_string(&MixQuantService::crd()).expect("a CRD is plain data");
    format!("{HEADER}{yaml}")
}

#[test]
fn the_committed_manifests_are_what_the_types_say() {
    let expected = expected();
    for file in [
        "crds/mixquantservices.yaml",
        "charts/mixquant-operator/crds/mixquantservices.yaml",
    ] {
        let path = repository().join(file);
        if env::var_os("UPDATE_EXPECT").is_some() {
            fs::create_dir_all(path.parent().expect("a file has a folder")).unwrap();
            fs::write(&path, &expected).unwrap();
        }
        let committed = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == expected,
            "{file} is stale: run `UPDATE_EXPECT=1 make check-generated`"
        );
    }
}

#[test]
fn every_example_is_a_service_that_the_types_read_whole() {
    let folder = repository().join("crds/examples");
    let mut seen = 0;
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "yaml") {
            continue;
        }
        let text = fs::read_to_string(&path).unwrap();
        let service: MixQuantService = serde_norway::from_str(&text)
            .unwrap_or_else(|error| panic!("{}: {error}", path.display()));
        assert!(service.metadata.name.is_some(), "{}", path.display());
        seen += 1;
    }
    assert!(seen >= 3, "only {seen} examples");
}

/// The plan that an advice recommends, as the service `chat` would have it.
fn advised(text: &str) -> Option<MixQuantService> {
    let (_, plan) = text.split_once("\nprecision:\n")?;
    let (plan, _) = plan.split_once("\n\n")?;
    let mut service: serde_norway::Value =
        serde_norway::from_str(include_str!("../examples/chat.yaml")).expect("YAML");
    service["spec"]["precision"] =
        serde_norway::from_str(plan).unwrap_or_else(|error| panic!("{error} in\n{plan}"));
    Some(serde_norway::from_value(service).unwrap_or_else(|error| panic!("{error} in\n{plan}")))
}

#[test]
fn every_advised_plan_is_a_precision_that_the_types_read_whole() {
    let folder = repository().join("engine/tests/advise");
    let (mut plans, mut none) = (0, 0);
    for entry in fs::read_dir(folder).unwrap() {
        let text = fs::read_to_string(entry.unwrap().path()).unwrap();
        if let Some(service) = advised(&text) {
            assert!(service.spec.precision.kv_cache.block_size > 0);
            plans += 1;
        } else {
            assert!(text.contains("recommended: nothing"), "{text}");
            none += 1;
        }
    }
    assert!(
        plans >= 4 && none >= 1,
        "{plans} plans, {none} advices without"
    );
}
