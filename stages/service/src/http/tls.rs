//! Certificates for TLS.

use std::path::Path;
use std::sync::Arc;

use rustls_pki_types::pem::{Error as PemError, PemObject};
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::{Error, InconsistentKeys, ServerConfig};

use super::setting_file;
use super::settings::SettingsError;

/// An acceptor for TLS 1.2 and 1.3 with this certificate and its key, both in PEM.
///
/// # Errors
/// If a file cannot be read, holds no certificate or key, or the two are not for each other.
pub fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, SettingsError> {
    let in_cert = |error: &dyn std::fmt::Display| SettingsError::file("tls_cert", cert, error);
    let in_key = |error: &dyn std::fmt::Display| SettingsError::file("tls_key", key, error);
    let text = setting_file::read(cert).map_err(|error| in_cert(&error))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| in_cert(&wrong_pem(&error)))?;
    if chain.is_empty() {
        return Err(in_cert(&"it holds no certificate in PEM"));
    }
    let text = setting_file::read(key).map_err(|error| in_key(&error))?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| in_key(&wrong_pem(&error)))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
    let mut config = config.map_err(|error| match error {
        Error::InconsistentKeys(InconsistentKeys::KeyMismatch) => in_cert(&"it is not the certificate of that key"),
        error => in_cert(&error),
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

/// Why a file cannot be read as PEM; of what is in it, nothing.
fn wrong_pem(error: &PemError) -> String {
    match error {
        PemError::MissingSectionEnd { .. } => "it is cut off: the last section in it has no end".to_owned(),
        PemError::NoItemsFound => {
            "it holds no private key in PEM that can be used; an encrypted one has to be decrypted first".to_owned()
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn files_that_hold_no_certificate_are_named() {
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let told = || acceptor(&cert, &key).err().unwrap().to_string();
        assert!(told().starts_with("setting `http.tls_cert`") && told().contains("cert.pem"));
        fs::write(&cert, "no certificate\n").unwrap();
        assert!(told().contains("holds no certificate"), "{}", told());
        fs::write(&cert, "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n").unwrap();
        assert!(told().starts_with("setting `http.tls_key`"), "{}", told());
        fs::write(&key, "no key\n").unwrap();
        assert!(told().starts_with("setting `http.tls_key`"), "{}", told());
    }

    /// Of the same kind as that of the certificate, and made for this test.
    const OTHER_KEY: &str = "-----BEGIN PRIVATE KEY-----\n\
        MIGHAgEAMBMGByqGSM49AgEGCCqGSM49AwEHBG0wawIBAQQgNQjbbh/99vWrFXAz\n\
        aXJvVUFP3jxLuzB49nGl09bNm0GhRANCAAQz9ZvAaMLI8JQVCHXf9mVteN6uFSmT\n\
        7jYPOePRzQYvIIO+0Pt3Fx/96b4rernGziaIxpXzoiVcf0IBKlXFYS3L\n\
        -----END PRIVATE KEY-----\n";

    #[test]
    fn what_is_wrong_with_a_certificate_or_key_is_told() {
        let given = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/tls");
        let text = |name: &str| fs::read_to_string(given.join(name)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (cert, key) = (folder.path().join("cert.pem"), folder.path().join("key.pem"));
        let told = |cert_text: &str, key_text: &str| {
            fs::write(&cert, cert_text).unwrap();
            fs::write(&key, key_text).unwrap();
            acceptor(&cert, &key)
                .err()
                .map(|error| error.to_string())
                .unwrap_or_default()
        };
        let (whole_cert, whole_key) = (text("cert.pem"), text("key.pem"));
        assert_eq!(told(&whole_cert, &whole_key), "");
        let half = &whole_cert[..whole_cert.len() / 2];
        assert!(told(half, &whole_key).contains("cut off"), "{}", told(half, &whole_key));
        let encrypted = whole_key.replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY");
        let why = told(&whole_cert, &encrypted);
        assert!(why.contains("`http.tls_key`") && why.contains("encrypted"), "{why}");
        // Another key of the same kind.
        let why = told(&whole_cert, OTHER_KEY);
        assert!(
            why.contains("`http.tls_cert`") && why.contains("not the certificate of that key"),
            "{why}"
        );
    }
}
