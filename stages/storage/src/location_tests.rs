use super::*;

fn object(given: &str) -> ObjectUrl {
    match Location::parse(given).unwrap() {
        Location::Object(url) => url,
        Location::Local(path) => panic!("{} is a path", path.display()),
    }
}

#[test]
fn what_users_write_is_read_and_shown_again() {
    for (given, bucket, key) in [
        ("s3://bucket/a/b.tar", "bucket", "a/b.tar"),
        ("s3://bucket", "bucket", ""),
        ("gs://my_bucket.eu/a b%20c", "my_bucket.eu", "a b%20c"),
        ("az://container/हिन्दी/x", "container", "हिन्दी/x"),
        ("s3://bucket/b #2.wav", "bucket", "b #2.wav"),
        ("s3://bucket/who? me=.wav", "bucket", "who? me=.wav"),
    ] {
        let url = object(given);
        assert_eq!((url.bucket(), url.key()), (bucket, key));
        assert_eq!(url.to_string(), given);
        assert!(is_url(given));
    }
    assert_eq!(object("S3://bucket/prefix/").to_string(), "s3://bucket/prefix");
    let web = object("https://host:8443/a%20b/%E0%A4%95%23.tar");
    assert_eq!((web.bucket(), web.key()), ("host:8443", "a b/क#.tar"));
    assert_eq!(web.to_string(), "https://host:8443/a%20b/%E0%A4%95%23.tar");
    assert_eq!(object(&web.to_string()), web);
    assert!(Location::parse("http://127.0.0.1:9000/a").is_ok() && Location::parse("http://[::1]:9000/a").is_ok());
    for (given, path) in [
        ("a/b", "a/b"),
        ("/a:b//c", "/a:b//c"),
        ("file:///a%20b", "/a b"),
        ("file://localhost/a", "/a"),
    ] {
        assert_eq!(Location::parse(given).unwrap(), Location::Local(path.into()));
    }
    assert!(!is_url("/a/s3://b") && is_url("file:///a"));
    assert_eq!(path_of_file_url("FILE:///a%20b"), Some("/a b".into()));
    for other in ["/a b", "s3://bucket/a", "file://host/a", "file:/a"] {
        assert_eq!(path_of_file_url(other), None);
    }
}

#[test]
fn what_is_no_location_is_refused_without_repeating_secrets() {
    for (given, said) in [
        ("s3://", "`s3://`: it names no bucket"),
        ("s3:///key", "`s3:///key`: it names no bucket"),
        ("https:///key", "`https:///key`: it names no host"),
        (
            "s3://bucket/a/../b",
            "`s3://bucket/a/../b`: no part of a key may be `..` or `.`",
        ),
        (
            "https://host/%2e%2e/b",
            "`https://host/%2e%2e/b`: no part of a key may be `..` or `.`",
        ),
        ("s3://bucket//b", "`s3://bucket//b`: no part of a key may be empty"),
        (
            "s3://bucket/a\nb",
            "`s3://bucket/a\\nb`: a key must not contain control characters",
        ),
        (
            "s3://buc ket/a",
            "`s3://buc ket/a`: `buc ket` is not the name of a bucket or host",
        ),
        (
            "http://example.com/a",
            "`http://example.com/a`: use https: http is for servers on this machine alone",
        ),
        (
            "https://host/%zz",
            "`https://host/%zz`: what follows a `%` is not a byte of UTF-8 text",
        ),
        (
            "ftp://host/a",
            "`ftp://` is not known here; there are s3, gs, az, https and file",
        ),
        (
            "file://host/a",
            "`file://host/a`: after file:// comes an absolute path of this machine",
        ),
    ] {
        let error = Location::parse(given).unwrap_err();
        assert_eq!(
            (error.fault, error.to_string().as_str()),
            (StorageFault::Location, said)
        );
    }
    for given in [
        "https://me:hush@host/a",
        "s3://hush@bucket/a",
        "https://host/a?X-Amz-Signature=hush",
        "https://host/a#hush",
        "s3://b/a?versionId=hush",
        "s3://b/a? b?X-Amz-Signature=hush",
        "az://b/a?sv=2024&sig=hush",
    ] {
        let error = Location::parse(given).unwrap_err().to_string();
        assert!(!error.contains("hush") && error.contains("***"), "{error}");
    }
}

#[test]
fn names_are_joined_below_and_nowhere_else() {
    let root = object("s3://bucket/shards");
    assert_eq!(
        root.join("hi/hi_0000").unwrap().to_string(),
        "s3://bucket/shards/hi/hi_0000"
    );
    assert_eq!(object("s3://bucket").join("a").unwrap().to_string(), "s3://bucket/a");
    for name in ["../a", "/a", "a/../../b", "a//b", "."] {
        assert!(root.join(name).is_err(), "{name}");
    }
    assert_eq!(root.parent().unwrap().to_string(), "s3://bucket");
    assert_eq!((root.parent().unwrap().parent(), root.name()), (None, "shards"));
    let path = Location::Object(root.clone()).to_path();
    assert_eq!(Location::of_path(&path).unwrap(), Location::Object(root));
    assert_eq!(
        Location::of_path(&path.join("hi")).unwrap().to_string(),
        "s3://bucket/shards/hi"
    );
}
