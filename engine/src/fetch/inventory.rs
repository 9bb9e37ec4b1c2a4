//! Which files of a source make the model: those that the engine reads, and no others of what a repository holds.
//!
//! An object store is listed; a web server is asked for the names that a model has. Names come from outside: only plain file names are taken.

use std::collections::BTreeMap;

use futures::{StreamExt as _, TryStreamExt as _};
use mixquant_crds::FailureReason;
use object_store::{GetOptions, ObjectMeta, ObjectStore as _};

use super::record::Item;
use super::source::Source;
use crate::model::{CONFIGURATION_FILES, SHARD_INDEX, SINGLE_SHARD, shards_of_index};
use crate::{Error, Result};

/// A folder of more objects is no model's.
const MAX_LISTED: usize = 10_000;
/// Indices of the largest models have a few MB.
const MAX_INDEX_BYTES: u64 = 64 << 20;
/// Questions to a web server at once.
const QUESTIONS: usize = 8;

/// The model's files, by name.
///
/// # Errors
/// A source that cannot be read, that holds no model, or whose index names what is not there.
pub(super) async fn find(source: &Source) -> Result<Vec<Item>> {
    if let Some(file) = &source.file {
        return Ok(vec![
            ask(source, file)
                .await?
                .ok_or_else(|| missing(source, file))?,
        ]);
    }
    let there = if source.lists {
        list(source).await?
    } else {
        ask_all(
            source,
            CONFIGURATION_FILES.iter().map(|name| (*name).to_owned()),
        )
        .await?
    };
    let mut files: BTreeMap<String, Item> = there
        .iter()
        .filter(|(name, _)| CONFIGURATION_FILES.contains(&name.as_str()))
        .map(|(name, item)| (name.clone(), item.clone()))
        .collect();
    let weights = weights(source, &there).await?;
    if weights.is_empty() {
        return Err(Error::model(format!(
            "{}: there is neither {SINGLE_SHARD} nor {SHARD_INDEX}{}: the URI must name a model's own folder",
            source.uri,
            if source.lists { " nor a GGUF file" } else { "" },
        )));
    }
    files.extend(weights);
    // Some stores list no ETag; without one an object that changes in the middle would not be noticed.
    let unnamed = |item: &&Item| source.lists && !item.has_e_tag();
    let names: Vec<String> = files
        .values()
        .filter(unnamed)
        .map(|item| item.name.clone())
        .collect();
    files.extend(ask_all(source, names.into_iter()).await?);
    Ok(files.into_values().collect())
}

/// The files of weights: the index's shards, or the only one, or GGUF files.
async fn weights(
    source: &Source,
    there: &BTreeMap<String, Item>,
) -> Result<BTreeMap<String, Item>> {
    let Some(index) = there.get(SHARD_INDEX) else {
        if !source.lists {
            return ask_all(source, std::iter::once(SINGLE_SHARD.to_owned())).await;
        }
        let only = there.get_key_value(SINGLE_SHARD);
        let has_config = there.contains_key("config.json");
        let gguf = there
            .iter()
            .filter(|(name, _)| !has_config && name.to_ascii_lowercase().ends_with(".gguf"));
        return Ok(match only {
            Some((name, item)) => BTreeMap::from([(name.clone(), item.clone())]),
            None => gguf
                .map(|(name, item)| (name.clone(), item.clone()))
                .collect(),
        });
    };
    let names = shards_of_index(&read(source, index).await?)?;
    let found = if source.lists {
        let of = |name: &String| Some((name.clone(), there.get(name)?.clone()));
        names.iter().filter_map(of).collect()
    } else {
        ask_all(source, names.iter().cloned()).await?
    };
    match names.iter().find(|name| !found.contains_key(*name)) {
        Some(name) => Err(missing(source, name)),
        None => Ok(found),
    }
}

fn missing(source: &Source, name: &str) -> Error {
    Error::new(
        FailureReason::SourceRefused,
        format!(
            "{}: it does not exist: upload the model again, or check the URI",
            source.shown(name)
        ),
    )
}

/// What lies in the folder itself.
async fn list(source: &Source) -> Result<BTreeMap<String, Item>> {
    let failed = |error: object_store::Error| source.failed("", &error);
    let mut found = BTreeMap::new();
    let mut seen = 0;
    let mut listed = source.store.list(Some(&source.folder));
    while let Some(object) = listed.try_next().await.map_err(failed)? {
        seen += 1;
        if seen > MAX_LISTED {
            return Err(Error::new(
                FailureReason::SourceRefused,
                format!(
                    "{}: holds more than {MAX_LISTED} objects: name the model's own folder",
                    source.uri
                ),
            ));
        }
        let mut below = object
            .location
            .prefix_match(&source.folder)
            .into_iter()
            .flatten();
        if let (Some(name), None) = (below.next(), below.next()) {
            let name = name.as_ref().to_owned();
            found.insert(name.clone(), item(name, &object));
        }
    }
    Ok(found)
}

async fn ask_all(
    source: &Source,
    names: impl Iterator<Item = String>,
) -> Result<BTreeMap<String, Item>> {
    let answers = futures::stream::iter(names).map(|name| async move { ask(source, &name).await });
    let found: Vec<Option<Item>> = answers.buffer_unordered(QUESTIONS).try_collect().await?;
    Ok(found
        .into_iter()
        .flatten()
        .map(|item| (item.name.clone(), item))
        .collect())
}

/// One file; `None` when it is not there.
async fn ask(source: &Source, name: &str) -> Result<Option<Item>> {
    let options = GetOptions {
        head: true,
        ..GetOptions::default()
    };
    match source.store.get_opts(&source.object(name), options).await {
        Ok(answer) => Ok(Some(item(name.to_owned(), &answer.meta))),
        Err(object_store::Error::NotFound { .. }) => Ok(None),
        Err(error) => Err(source.failed(name, &error)),
    }
}

fn item(name: String, object: &ObjectMeta) -> Item {
    Item {
        name,
        size: object.size,
        version: version(object),
    }
}

/// What changes when the content does. Of a server that sends neither, nothing can be told.
pub(super) fn version(object: &ObjectMeta) -> Option<String> {
    object.e_tag.clone().or_else(|| {
        let changed = object.last_modified.timestamp();
        (changed != 0).then(|| format!("modified {changed}"))
    })
}

/// A small file, whole.
async fn read(source: &Source, item: &Item) -> Result<Vec<u8>> {
    if item.size > MAX_INDEX_BYTES {
        return Err(Error::model(format!(
            "{}: has {} bytes, more than any index",
            source.shown(&item.name),
            item.size
        )));
    }
    let failed = |error: object_store::Error| source.failed(&item.name, &error);
    let answer = source
        .store
        .get_opts(&source.object(&item.name), GetOptions::default())
        .await
        .map_err(failed)?;
    Ok(answer.bytes().await.map_err(failed)?.to_vec())
}
