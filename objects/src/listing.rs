//! Listings are looked at before the store's client does that: one that was cut on its way is asked for again, as every
//! other request is, and the page of a gateway in place of one is not a store that holds nothing.

use async_trait::async_trait;
use object_store::client::{
    HttpClient, HttpConnector, HttpError, HttpErrorKind, HttpRequest, HttpResponse, HttpService, ReqwestConnector,
};
use object_store::ClientOptions;
use std::io;

/// What a listing consists of: S3 and Google, Azure.
const ROOTS: [&str; 2] = ["ListBucketResult", "EnumerationResults"];
/// So much of something else is quoted.
const QUOTED: usize = 60;

/// Makes clients that look at listings.
#[derive(Debug)]
pub(crate) struct Looking;

impl HttpConnector for Looking {
    fn connect(&self, options: &ClientOptions) -> object_store::Result<HttpClient> {
        let client = ReqwestConnector::default().connect(options)?;
        Ok(HttpClient::new(Service(client)))
    }
}

#[derive(Debug)]
struct Service(HttpClient);

#[async_trait]
impl HttpService for Service {
    async fn call(&self, request: HttpRequest) -> Result<HttpResponse, HttpError> {
        let is_listing = request.uri().query().is_some_and(asks_for_listing);
        let answer = self.0.execute(request).await?;
        if !is_listing || !answer.status().is_success() {
            return Ok(answer);
        }
        let (head, body) = answer.into_parts();
        let body = body
            .bytes()
            .await
            .map_err(|e| HttpError::new(HttpErrorKind::Interrupted, e))?;
        check(&String::from_utf8_lossy(&body))?;
        Ok(HttpResponse::from_parts(head, body.into()))
    }
}

fn asks_for_listing(query: &str) -> bool {
    query.split('&').any(|q| q.starts_with("list-type=") || q == "comp=list")
}

/// Refuses what is not a whole listing.
fn check(text: &str) -> Result<(), HttpError> {
    let text = text.trim_start_matches('\u{feff}').trim();
    let elements = match text.strip_prefix("<?") {
        Some(declaration) => declaration.split_once("?>").map_or("", |(_, rest)| rest).trim_start(),
        None => text,
    };
    let root = ROOTS
        .iter()
        .find(|root| elements.strip_prefix('<').is_some_and(|e| e.starts_with(**root)));
    let is_empty = |root: &str| elements.ends_with("/>") && elements.matches('<').count() == 1 && elements.contains(root);
    match root {
        Some(root) if text.ends_with(&format!("</{root}>")) || is_empty(root) => Ok(()),
        None if !elements.is_empty() && !ROOTS.iter().any(|root| format!("<{root}").starts_with(elements)) => {
            let what: String = elements.chars().take(QUOTED).collect();
            let why = format!(
                "the answer is no listing of a store but begins with {what:?}: is the endpoint that of the store, and no gateway with a page of its own before it?"
            );
            Err(HttpError::new(HttpErrorKind::Unknown, io::Error::other(why)))
        }
        _ => {
            let why = io::Error::new(io::ErrorKind::UnexpectedEof, "the listing was cut on its way");
            Err(HttpError::new(HttpErrorKind::Interrupted, why))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_whole_listings_pass() {
        let s3 = "<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n<ListBucketResult xmlns=\"x\"><Contents/></ListBucketResult>\n";
        let azure = "\u{feff}<?xml version=\"1.0\"?><EnumerationResults><Blobs /></EnumerationResults>";
        for whole in [s3, azure, "<ListBucketResult/>"] {
            check(whole).unwrap();
        }
        for end in 0..s3.trim_end().len() {
            let cut = check(&s3[..end]).unwrap_err();
            assert_eq!(cut.kind(), HttpErrorKind::Interrupted, "{:?}", &s3[..end]);
        }
        for page in ["<!DOCTYPE html><html></html>", "<html>Log in</html>", "{}"] {
            let e = check(page).unwrap_err();
            assert_eq!(e.kind(), HttpErrorKind::Unknown);
            assert!(
                e.to_string().contains("no listing") && e.to_string().contains("endpoint"),
                "{e}"
            );
        }
    }

    #[test]
    fn listings_are_known_by_their_queries() {
        assert!(asks_for_listing("delimiter=%2F&list-type=2&prefix=a"));
        assert!(asks_for_listing("restype=container&comp=list"));
        assert!(!asks_for_listing("uploads") && !asks_for_listing("comp=blocklist"));
    }
}
