//! The objects: files of a directory.

use s3s::dto::*;
use s3s::{s3_error, Body, S3Request, S3Response, S3Result, S3};
use s3s_fs::FileSystem;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Component, Path, PathBuf};

/// The buckets in a directory.
pub(crate) struct Store {
    files: FileSystem,
    root: PathBuf,
}

impl Store {
    pub(crate) fn open(root: PathBuf) -> Result<Self, s3s_fs::Error> {
        FileSystem::new(&root).map(|files| Self { files, root })
    }

    /// The piece of an object that is asked for. That of `s3s-fs` reads and hashes the whole object for each: an object
    /// of 128 MiB, read in pieces of 8 MiB, would be hashed sixteen times.
    fn piece(&self, input: &GetObjectInput) -> S3Result<GetObjectOutput> {
        let key = Path::new(&input.key);
        if !key.components().all(|c| matches!(c, Component::Normal(_))) {
            return Err(s3_error!(InvalidArgument));
        }
        let mut file = File::open(self.root.join(&input.bucket).join(key)).map_err(|e| s3_error!(e, NoSuchKey))?;
        let failed = |e: io::Error| s3_error!(e, InternalError);
        let about = file.metadata().map_err(failed)?;
        let whole = about.len();
        let range = input.range.map(|r| r.check(whole)).transpose()?;
        let content_range = range.as_ref().map(|r| format!("bytes {}-{}/{whole}", r.start, r.end - 1));
        let range = range.unwrap_or(0..whole);
        let mut piece = Vec::new();
        file.seek(SeekFrom::Start(range.start)).map_err(failed)?;
        file.take(range.end - range.start).read_to_end(&mut piece).map_err(failed)?;
        let modified = about.modified().map_err(failed)?;
        let since = modified.duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
        Ok(GetObjectOutput {
            content_length: i64::try_from(piece.len()).ok(),
            content_range,
            body: Some(Body::from(piece).into()),
            last_modified: Some(Timestamp::from(modified)),
            // Another for each that is put at this place, as the rules ask.
            e_tag: Some(format!("\"{:x}-{whole:x}\"", since.as_nanos())),
            ..GetObjectOutput::default()
        })
    }
}

/// The requests that are those of `s3s-fs`.
macro_rules! requests {
    ($($name:ident: $input:ident => $output:ident,)*) => {
        #[async_trait::async_trait]
        impl S3 for Store {
            $(async fn $name(&self, request: S3Request<$input>) -> S3Result<S3Response<$output>> {
                self.files.$name(request).await
            })*

            async fn get_object(&self, request: S3Request<GetObjectInput>) -> S3Result<S3Response<GetObjectOutput>> {
                self.piece(&request.input).map(S3Response::new)
            }
        }
    };
}

requests! {
    abort_multipart_upload: AbortMultipartUploadInput => AbortMultipartUploadOutput,
    complete_multipart_upload: CompleteMultipartUploadInput => CompleteMultipartUploadOutput,
    copy_object: CopyObjectInput => CopyObjectOutput,
    create_multipart_upload: CreateMultipartUploadInput => CreateMultipartUploadOutput,
    delete_object: DeleteObjectInput => DeleteObjectOutput,
    delete_objects: DeleteObjectsInput => DeleteObjectsOutput,
    head_bucket: HeadBucketInput => HeadBucketOutput,
    head_object: HeadObjectInput => HeadObjectOutput,
    list_objects_v2: ListObjectsV2Input => ListObjectsV2Output,
    list_parts: ListPartsInput => ListPartsOutput,
    put_object: PutObjectInput => PutObjectOutput,
    upload_part: UploadPartInput => UploadPartOutput,
}
