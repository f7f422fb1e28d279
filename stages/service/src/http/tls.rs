//! Certificates for TLS.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use rustls_pki_types::pem::PemObject;
use rustls_pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;

use super::settings::SettingsError;

/// An acceptor for TLS 1.2 and 1.3 with this certificate and its key, both in PEM.
///
/// # Errors
/// If a file cannot be read, holds no certificate or key, or the two are not for each other.
pub fn acceptor(cert: &Path, key: &Path) -> Result<TlsAcceptor, SettingsError> {
    let in_cert = |error: &dyn std::fmt::Display| SettingsError::file("tls_cert", cert, error);
    let in_key = |error: &dyn std::fmt::Display| SettingsError::file("tls_key", key, error);
    let text = fs::read(cert).map_err(|error| in_cert(&error))?;
    let chain: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&text).collect();
    let chain = chain.map_err(|error| in_cert(&error))?;
    if chain.is_empty() {
        return Err(in_cert(&"it holds no certificate in PEM"));
    }
    let text = fs::read(key).map_err(|error| in_key(&error))?;
    let key = PrivateKeyDer::from_pem_slice(&text).map_err(|error| in_key(&error))?;
    let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .and_then(|builder| builder.with_no_client_auth().with_single_cert(chain, key));
    let mut config = config.map_err(|error| in_cert(&error))?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(TlsAcceptor::from(Arc::new(config)))
}

#[cfg(test)]
mod tests {
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
}
