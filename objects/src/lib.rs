//! A tier in an object store: S3 and what speaks its protocol, Google Cloud Storage, Azure Blob Storage; for tests also
//! a local directory, which is not made durable and which no configuration can name.
//!
//! ```text
//! put ── parts of 8 MiB, uploaded one after the other ──> finish: the object is there
//! ```
//! The store makes objects appear whole or not at all. An upload that a kill interrupts is invisible and is removed by
//! the store itself, where its owner has told it to (a lifecycle rule for incomplete uploads). Credentials come from
//! the environment (`AWS_…`, `GOOGLE_…`, `AZURE_…`) or the machine, never from belay's files.
//!
//! The runtime has one thread, made when the tier is opened and ended when it is dropped.

mod listing;

use belay_kernel::direct::Buffer;
use belay_storage::tier::gather::Gather;
use belay_storage::tier::{failed, is_key, Object, Put, Tier, OBJECT_URLS};
use belay_storage::StorageError;
use bytes::Bytes;
use futures_util::TryStreamExt;
use listing::Looking;
use object_store::aws::AmazonS3Builder;
use object_store::azure::{AzureConfigKey, MicrosoftAzureBuilder};
use object_store::gcp::GoogleCloudStorageBuilder;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use object_store::{BackoffConfig, ClientOptions, MultipartUpload, ObjectStore, ObjectStoreExt, PutPayload, RetryConfig};
use std::collections::BTreeSet;
use std::future::Future;
use std::io;
use std::ops::Range;
use std::time::Duration;
use tokio::runtime::Runtime;

// Used by object_store; named among the dependencies to choose its cryptography.
use reqwest as _;

/// Bytes of a part, the last one excepted.
const PART: usize = 8 << 20;
/// A store that does not connect within this is not reachable.
const CONNECT: Duration = Duration::from_secs(5);
/// How long a store may keep a request waiting, and for how long one that it refuses for the moment is tried again,
/// where nothing else is said.
const PATIENCE: Duration = Duration::from_secs(60);
/// Longest pause before a request is tried again; the pauses grow up to this, and differ at random.
const PAUSE: Duration = Duration::from_secs(3);

/// Where a store is.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Location {
    /// One of [`OBJECT_URLS`], or for tests `file:///directory`.
    pub url: String,
    /// Address of the service, where it is not that of Amazon, Google or Azure; for Azure with the account, where that
    /// is part of the path.
    pub endpoint: Option<String>,
    /// Its region (S3).
    pub region: Option<String>,
    /// Talk to it without encryption.
    pub allow_http: bool,
    /// How long it may keep a request waiting, and for how long a request that fails is tried again.
    pub timeout: Option<Duration>,
}

/// A tier in an object store.
#[derive(Debug)]
pub struct Objects {
    name: String,
    store: Box<dyn ObjectStore>,
    root: Path,
    runtime: Runtime,
}

fn reason(e: object_store::Error) -> io::Error {
    let kind = match e {
        object_store::Error::NotFound { .. } => io::ErrorKind::NotFound,
        object_store::Error::PermissionDenied { .. } | object_store::Error::Unauthenticated { .. } => {
            io::ErrorKind::PermissionDenied
        }
        _ => io::ErrorKind::Other,
    };
    io::Error::new(kind, e)
}

impl Objects {
    /// The tier `name`: everything below `folder` in the store at `location`. Asks the store for nothing yet.
    pub fn open(name: &str, location: &Location, folder: &str) -> Result<Self, StorageError> {
        let fail = |e: object_store::Error| failed(name, "open", &location.url, reason(e));
        let invalid = |why: &str| {
            let e = io::Error::new(io::ErrorKind::InvalidInput, why);
            failed(name, "open", &location.url, e)
        };
        let (scheme, rest) = location.url.split_once("://").unwrap_or_default();
        let (bucket, prefix) = rest.split_once('/').unwrap_or((rest, ""));
        let (store, prefix): (Box<dyn ObjectStore>, &str) = match scheme {
            "s3" => (Box::new(s3(location, bucket).build().map_err(fail)?), prefix),
            "gs" => (Box::new(google(location, bucket).build().map_err(fail)?), prefix),
            "az" | "abfs" | "abfss" => {
                let builder = azure(location, &format!("{scheme}://{bucket}"));
                let account = builder.get_config_value(&AzureConfigKey::AccountName);
                if account.is_none() && !bucket.contains('@') && !is_emulated(&builder) {
                    return Err(invalid(
                        "no storage account: set AZURE_STORAGE_ACCOUNT_NAME, or name it in the url: abfss://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX",
                    ));
                }
                (Box::new(builder.build().map_err(fail)?), prefix)
            }
            "file" => {
                std::fs::create_dir_all(rest).map_err(|e| failed(name, "make", rest, e))?;
                (Box::new(LocalFileSystem::new_with_prefix(rest).map_err(fail)?), "")
            }
            _ => return Err(invalid(&format!("not {OBJECT_URLS}"))),
        };
        let root = Path::parse(format!("{}/{folder}", prefix.trim_matches('/')).trim_start_matches('/'))
            .map_err(|_| invalid("the prefix is not a path"))?;
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .thread_name("belay-objects")
            .enable_all()
            .build()
            .map_err(|e| failed(name, "start a thread for", &location.url, e))?;
        Ok(Self {
            name: name.to_owned(),
            store,
            root,
            runtime,
        })
    }

    fn path(&self, step: &'static str, key: &str) -> Result<Path, StorageError> {
        if !is_key(key) {
            return Err(failed(&self.name, step, key, io::ErrorKind::InvalidInput.into()));
        }
        Ok(self.below(key))
    }

    /// What `key`, or a part of keys, is in the store.
    fn below(&self, key: &str) -> Path {
        Path::from(format!("{}/{key}", self.root).trim_start_matches('/'))
    }

    /// What the tier calls the object at `path`. Others may have put what they like into the bucket.
    fn key<'a>(&self, path: &'a Path) -> Option<&'a str> {
        let below = path.as_ref().strip_prefix(self.root.as_ref())?;
        let key = if self.root.as_ref().is_empty() {
            below
        } else {
            below.strip_prefix('/')?
        };
        is_key(key).then_some(key)
    }

    fn wait<T>(
        &self,
        step: &'static str,
        key: &str,
        work: impl Future<Output = object_store::Result<T>>,
    ) -> Result<T, StorageError> {
        self.runtime
            .block_on(work)
            .map_err(|e| failed(&self.name, step, key, reason(e)))
    }
}

/// How all stores are talked to.
fn client(location: &Location) -> (ClientOptions, RetryConfig) {
    // Whoever installed a provider before has chosen one that serves as well.
    drop(rustls::crypto::ring::default_provider().install_default());
    let patience = location.timeout.unwrap_or(PATIENCE);
    let client = ClientOptions::new()
        .with_connect_timeout(CONNECT.min(patience))
        .with_timeout(patience)
        .with_allow_http(location.allow_http);
    // Time bounds them, not their number: half of the requests may fail.
    let retry = RetryConfig {
        backoff: BackoffConfig {
            max_backoff: PAUSE,
            ..BackoffConfig::default()
        },
        max_retries: usize::MAX,
        retry_timeout: patience,
    };
    (client, retry)
}

fn s3(location: &Location, bucket: &str) -> AmazonS3Builder {
    let (client, retry) = client(location);
    let mut builder = AmazonS3Builder::from_env()
        .with_bucket_name(bucket)
        // One request for each removal: the answers to lists of them differ between services.
        .with_disable_bulk_delete(true)
        .with_http_connector(Looking)
        .with_client_options(client)
        .with_retry(retry);
    if let Some(endpoint) = &location.endpoint {
        builder = builder.with_endpoint(endpoint);
    }
    if let Some(region) = &location.region {
        builder = builder.with_region(region);
    }
    builder
}

fn google(location: &Location, bucket: &str) -> GoogleCloudStorageBuilder {
    let (client, retry) = client(location);
    let builder = GoogleCloudStorageBuilder::from_env()
        .with_bucket_name(bucket)
        .with_http_connector(Looking)
        .with_client_options(client)
        .with_retry(retry);
    match &location.endpoint {
        Some(endpoint) => builder.with_base_url(endpoint),
        None => builder,
    }
}

fn azure(location: &Location, container: &str) -> MicrosoftAzureBuilder {
    let (client, retry) = client(location);
    let builder = MicrosoftAzureBuilder::from_env()
        .with_url(container)
        .with_http_connector(Looking)
        .with_client_options(client)
        .with_retry(retry);
    match &location.endpoint {
        Some(endpoint) => builder.with_endpoint(endpoint.clone()),
        None => builder,
    }
}

/// Whether the environment asks for the emulator, which has an account of its own.
fn is_emulated(azure: &MicrosoftAzureBuilder) -> bool {
    azure.get_config_value(&AzureConfigKey::UseEmulator).as_deref() == Some("true")
}

impl Tier for Objects {
    fn name(&self) -> &str {
        &self.name
    }

    fn put<'a>(&'a self, key: &str) -> Result<Box<dyn Put + 'a>, StorageError> {
        let parts = Parts {
            path: self.path("write", key)?,
            key: key.to_owned(),
            tier: self,
            begun: None,
            is_new: false,
        };
        Ok(Box::new(Upload {
            gather: Gather::new(PART),
            bytes: 0,
            parts,
        }))
    }

    fn get(&self, key: &str, range: Range<u64>, buf: &mut Buffer) -> Result<(), StorageError> {
        let path = self.path("read", key)?;
        let short = || failed(&self.name, "read", key, io::ErrorKind::UnexpectedEof.into());
        buf.clear();
        if range.is_empty() {
            let bytes = self.length(key)?.ok_or_else(short)?;
            return if range.end <= bytes { Ok(()) } else { Err(short()) };
        }
        let data = self.wait("read", key, self.store.get_range(&path, range.clone()))?;
        if data.len() as u64 != range.end - range.start {
            return Err(short());
        }
        buf.extend_from_slice(&data);
        Ok(())
    }

    fn length(&self, key: &str) -> Result<Option<u64>, StorageError> {
        let path = self.path("look for", key)?;
        match self.wait("look for", key, self.store.head(&path)) {
            Ok(meta) => Ok(Some(meta.size)),
            Err(StorageError::Tier { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(e) => Err(e),
        }
    }

    fn list(&self, prefix: &str) -> Result<Vec<Object>, StorageError> {
        let path = self.below(prefix);
        let found: Vec<_> = self.wait("list", prefix, self.store.list(Some(&path)).try_collect())?;
        let object = |meta: &object_store::ObjectMeta| {
            let key = self.key(&meta.location)?.to_owned();
            Some(Object { key, bytes: meta.size })
        };
        let mut out: Vec<Object> = found.iter().filter_map(object).collect();
        out.sort();
        Ok(out)
    }

    fn folders(&self) -> Result<Vec<String>, StorageError> {
        let found = self.wait("list", "", self.store.list_with_delimiter(Some(&self.root)))?;
        let grouped = found.common_prefixes.iter().filter_map(|p| self.key(p));
        // A service that does not group them lists all there are.
        let single = found
            .objects
            .iter()
            .filter_map(|o| Some(self.key(&o.location)?.split_once('/')?.0));
        Ok(grouped
            .chain(single)
            .map(str::to_owned)
            .collect::<BTreeSet<_>>()
            .into_iter()
            .collect())
    }

    fn delete(&self, key: &str) -> Result<(), StorageError> {
        let path = self.path("remove", key)?;
        match self.wait("remove", key, self.store.delete(&path)) {
            Err(StorageError::Tier { source, .. }) if source.kind() == io::ErrorKind::NotFound => Ok(()),
            other => other,
        }
    }

    fn sync(&self) -> Result<(), StorageError> {
        // The store answers when it holds the object durably.
        Ok(())
    }

    fn free(&self) -> Result<Option<u64>, StorageError> {
        Ok(None)
    }

    fn clear(&self) -> Result<u64, StorageError> {
        // What was not finished cannot be seen.
        Ok(0)
    }
}

/// An object being uploaded.
struct Upload<'a> {
    gather: Gather,
    /// How long it is.
    bytes: u64,
    parts: Parts<'a>,
}

/// The parts of an object. Dropped, they are given up.
struct Parts<'a> {
    tier: &'a Objects,
    key: String,
    path: Path,
    /// Once there is more than one part.
    begun: Option<Box<dyn MultipartUpload>>,
    /// There was no such object when it was begun.
    is_new: bool,
}

impl Parts<'_> {
    fn send(&mut self, part: Buffer) -> Result<(), StorageError> {
        let mut begun = match self.begun.take() {
            Some(begun) => begun,
            None => {
                self.is_new = self.tier.length(&self.key)?.is_none();
                let begun = self.tier.store.put_multipart(&self.path);
                self.tier.wait("write", &self.key, begun)?
            }
        };
        let part = begun.put_part(PutPayload::from(Bytes::from_owner(part)));
        self.begun = Some(begun);
        self.tier.wait("write", &self.key, part)
    }
}

impl Put for Upload<'_> {
    fn write(&mut self, data: &[u8]) -> Result<(), StorageError> {
        self.bytes += data.len() as u64;
        self.gather.add(data, |part| self.parts.send(std::mem::take(part)))
    }

    fn finish(mut self: Box<Self>) -> Result<(), StorageError> {
        let (rest, parts) = (self.gather.rest(), &mut self.parts);
        let (tier, key) = (parts.tier, &parts.key);
        if parts.begun.is_none() {
            let put = tier.store.put(&parts.path, PutPayload::from(Bytes::from_owner(rest)));
            return tier.wait("write", key, put).map(drop);
        }
        if !rest.is_empty() {
            parts.send(rest)?;
        }
        let Some(begun) = parts.begun.as_mut() else {
            return Ok(());
        };
        if let Err(e) = parts.tier.wait("complete", &parts.key, begun.complete()) {
            // The answer may have been late: who asks again is told that there is no such upload any more.
            let is_there = || parts.tier.length(&parts.key).is_ok_and(|found| found == Some(self.bytes));
            if !parts.is_new || !is_there() {
                return Err(e);
            }
            tracing::info!(key = parts.key, error = %e, "the object is complete all the same");
        }
        parts.begun = None;
        Ok(())
    }
}

impl Drop for Parts<'_> {
    fn drop(&mut self) {
        if let Some(mut begun) = self.begun.take() {
            if let Err(e) = self.tier.wait("give up", &self.key, begun.abort()) {
                tracing::warn!(key = self.key, error = %e, "an upload could not be given up");
            }
        }
    }
}
