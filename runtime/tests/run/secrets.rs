//! Parameters whose values are never shown.

use super::*;

const PASSWORD: &str = "correct horse 1234";

const LOGIN: &str = r#"
flow: 1
params:
  shards: {required: true}
  out: {required: true}
  site: {password: {secret: true, help: for the site}}
  user: ann
stages:
  scan: {uses: toy.count, with: {folder: "${shards}"}}
  login: {uses: toy.login, from: scan, with: {password: "${site.password}", user: "${user}"}}
  out: {uses: toy.write, from: login, with: {folder: "${out}"}}
"#;

/// The files below a folder whose name or contents hold a text.
fn files_with(folder: &Path, text: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.to_string_lossy().contains(text) {
            found.push(path.clone());
        }
        if path.is_dir() {
            found.extend(files_with(&path, text));
        } else {
            let bytes = fs::read(&path).unwrap();
            if bytes.windows(text.len()).any(|window| window == text.as_bytes()) {
                found.push(path);
            }
        }
    }
    found
}

/// What loading and checking say, with the paths that the pipeline needs.
fn check_with(place: &Place, set: &[String], environment: Option<&str>) -> Result<Arc<Checked>, String> {
    let mut set = set.to_vec();
    for name in ["shards", "out"] {
        set.push(format!("{name}={}", place.path(name).display()));
    }
    let value = environment.map(str::to_string);
    let overrides = Overrides {
        set,
        environment: Arc::new(move |name| value.clone().filter(|_| name == "PASSWORD")),
        ..Overrides::default()
    };
    let registry = Registry::new(toys::kinds()).unwrap();
    let pipeline = load(&place.path("pipeline.yaml"), &overrides, &registry);
    let checked = pipeline.and_then(|pipeline| check(pipeline, &registry));
    checked.map(Arc::new).map_err(|found| format!("{found:?} {found}"))
}

/// What is wrong with the pipeline.
fn refusal(place: &Place, set: &[String], environment: Option<&str>) -> String {
    check_with(place, set, environment).err().unwrap()
}

fn given() -> Vec<String> {
    vec![format!("site.password={PASSWORD}")]
}

#[test]
fn a_secret_is_found_nowhere_after_runs() {
    let place = Place::new();
    place.pipeline(LOGIN);
    let checked = check_with(&place, &given(), None).unwrap();
    let planned = plan(&checked, &place.options).unwrap();
    let events = Events::default();
    let seen = Arc::new(Mutex::new(String::new()));
    let listener = Arc::clone(&seen);
    events.listen(move |event| {
        listener
            .lock()
            .unwrap()
            .push_str(&serde_json::to_string(event).unwrap())
    });
    run(&checked, &place.options, &events).unwrap();
    assert!(place.path("out/rows.txt").exists());
    // The stage was given the value, and what it said was shown without it.
    let said = seen.lock().unwrap().clone();
    assert!(
        said.contains("ann logs in with ***") && said.contains("sent ***"),
        "{said}"
    );
    // A run that fails, with the value in its error.
    place.pipeline(&LOGIN.replace("user: \"${user}\"}", "user: \"${user}\", fail: true}"));
    let failing = check_with(&place, &given(), None).unwrap();
    let error = run(&failing, &place.options, &events).unwrap_err();
    assert!(error.to_string().ends_with(": *** was refused"), "{error}");
    assert_eq!(error.help().as_deref(), Some("change ***"));
    let shown = [
        serde_json::to_string(&planned).unwrap(),
        checked.pipeline.frozen(),
        format!("{:?}", checked.pipeline),
        format!("{error:?}"),
        seen.lock().unwrap().clone(),
    ];
    for text in shown {
        assert!(!text.contains(PASSWORD), "{text}");
    }
    assert_eq!(files_with(place.dir.path(), PASSWORD), Vec::<PathBuf>::new());
    // The search finds what is there.
    assert!(!files_with(place.dir.path(), "site.password").is_empty());
}

#[test]
fn another_value_is_the_same_recipe() {
    let place = Place::new();
    place.pipeline(LOGIN);
    run(
        &check_with(&place, &given(), None).unwrap(),
        &place.options,
        &Events::default(),
    )
    .unwrap();
    let other = check_with(&place, &["site.password=another one".to_string()], None).unwrap();
    assert!(plan(&other, &place.options).unwrap().is_empty());
}

#[test]
fn a_secret_comes_from_the_environment_as_text() {
    let place = Place::new();
    place.pipeline(
        &LOGIN
            .replace("{secret: true,", "{default: \"${env:PASSWORD}\", secret: true,")
            .replace("user: \"${user}\"}", "length: 8}"),
    );
    // No number, whatever it looks like.
    let checked = check_with(&place, &[], Some("0012.500")).unwrap();
    assert!(!checked.pipeline.frozen().contains("0012.500"));
    let error = refusal(&place, &[], None);
    assert!(error.contains("`PASSWORD` is not set"), "{error}");
    // What a kind says of the value when the pipeline is checked.
    let error = refusal(&place, &[], Some(PASSWORD));
    assert!(
        error.contains("`***` has another length") && !error.contains(PASSWORD),
        "{error}"
    );
}

#[test]
fn a_secret_whose_default_is_null_need_not_be_given() {
    let place = Place::new();
    let optional = LOGIN.replace("{secret: true,", "{default: null, secret: true,");
    assert_ne!(optional, LOGIN);
    place.pipeline(&optional);
    let checked = check_with(&place, &given(), None).unwrap();
    assert!(!checked.pipeline.frozen().contains(PASSWORD));
    // It is null then, which this kind does not take.
    let error = refusal(&place, &[], None);
    assert!(error.contains("expected a parameter with `secret: true`"), "{error}");
    assert!(!error.contains("is required"), "{error}");
    // A group hands it on, given or not.
    let inner = "flow: 1\nparams: {token: {default: null, secret: true}, shards: {required: true}}\nstages:\n  scan: {uses: toy.count, with: {folder: \"${shards}\"}}\n";
    fs::write(place.path("inner.yaml"), inner).unwrap();
    place.pipeline(
        "flow: 1\nparams: {token: {default: null, secret: true}, shards: {required: true}, out: {required: true}}\n\
         include: {inner: {pipeline: inner.yaml, params: [token, shards]}}\n\
         stages: {write: {uses: toy.write, from: inner/scan, with: {folder: \"${out}\"}}}\n",
    );
    check_with(&place, &[], None).unwrap();
    // So does a variable that is empty or not there.
    check_with(&place, &["token=${env:FLOW_TEST_NO_SUCH_VARIABLE:-}".to_string()], None).unwrap();
    let checked = check_with(&place, &[format!("token={PASSWORD}")], None).unwrap();
    assert!(!checked.pipeline.frozen().contains(PASSWORD));
}

#[test]
fn where_a_secret_would_be_shown_it_is_refused() {
    let place = Place::new();
    for (from, to, said) in [
        (
            "user: \"${user}\"}",
            "user: \"${site.password}\"}",
            "this setting may be shown",
        ),
        (
            "user: \"${user}\"}",
            "user: \"a ${site.password}\"}",
            "is a secret, which cannot be part of a text",
        ),
        (
            "\"${site.password}\"",
            "\"plain text\"",
            "expected a parameter with `secret: true`",
        ),
        (
            "\"${site.password}\"",
            "\"${user}\"",
            "expected a parameter with `secret: true`",
        ),
        (
            "from: scan,",
            "when: \"${site.password} == 'a'\", from: scan,",
            "`when`",
        ),
        (
            "  user: ann",
            "  user: \"x${site.password}\"",
            "is a secret, which cannot be part of a text",
        ),
    ] {
        let text = LOGIN.replace(from, to);
        assert_ne!(text, LOGIN, "{from}");
        place.pipeline(&text);
        let error = refusal(&place, &given(), None);
        assert!(error.contains(said), "{to}: {error}");
        assert!(!error.contains(PASSWORD), "{to}: {error}");
    }
    place.pipeline(LOGIN);
    for (set, said) in [
        (vec![], "parameter `site.password` is required"),
        (vec!["site.password=short".to_string()], "less than 6 characters"),
        (
            vec!["site.pasword=hunter22".to_string()],
            "unknown parameter `site.pasword`",
        ),
        (
            vec!["site.password.x=hunter22".to_string()],
            "parameter `site.password.x`",
        ),
        (vec!["site=hunter22".to_string()], "`site` is a group of parameters"),
        (vec!["wandb-api-key=hunter22".to_string()], "--set wandb-api-key=***"),
        (vec!["hf_token=hunter22".to_string()], "--set hf_token=***"),
    ] {
        let error = refusal(&place, &set, None);
        assert!(error.contains(said), "{error}");
        assert!(!error.contains("=short") && !error.contains("hunter22"), "{error}");
    }
    // What is not a secret, and is not like one, is shown.
    for set in ["usr=ben", "site.url=x", "max_tokens=9", "user.name=ben"] {
        let error = refusal(&place, &[set.to_string()], None);
        assert!(error.contains(&format!("--set {set}: ")), "{set}: {error}");
    }
    for default in ["in the file", "'${env:PASSWORD:-in the file}'"] {
        place.pipeline(&LOGIN.replace("{secret: true,", &format!("{{default: {default}, secret: true,")));
        let error = refusal(&place, &given(), None);
        assert!(error.contains("a pipeline file cannot contain its value"), "{error}");
    }
    place.pipeline(&LOGIN.replace("{secret: true,", "{default: '${env:PASSWORD:-}', secret: true,"));
    check_with(&place, &given(), None).unwrap();
}

/// An include writes into a pipeline file, too.
#[test]
fn an_include_gives_a_secret_no_text() {
    let place = Place::new();
    let inner = LOGIN.replace("  user: ann", "  user: ann\n  other: 1");
    assert_ne!(inner, LOGIN);
    fs::write(place.path("inner.yaml"), inner).unwrap();
    let including = |params: &str| {
        place.pipeline(&format!(
            "flow: 1\nparams: {{word: {PASSWORD}, password: {{default: null, secret: true}}, shards: {{required: true}}, out: {{required: true}}}}\n\
             include: {{inner: {{pipeline: inner.yaml, params: {{{params}, shards: '${{shards}}', out: '${{out}}'}}}}}}\n"
        ));
    };
    for params in [
        format!("site: {{password: {PASSWORD}}}"),
        format!("site.password: {PASSWORD}"),
        "site: {password: '${word}'}".to_string(),
        format!("site: {{password: '${{env:NOT_SET:-{PASSWORD}}}'}}"),
    ] {
        including(&params);
        let error = refusal(&place, &[], Some(PASSWORD));
        assert!(
            error.contains("`site.password` is secret, so a pipeline file cannot contain its value"),
            "{params}: {error}"
        );
        assert!(!error.contains("is required"), "{params}: {error}");
        assert!(!error.contains(PASSWORD), "{params}: {error}");
    }
    // As text, whatever it looks like, and by a parameter that is secret itself.
    including("site: {password: '${env:PASSWORD}'}");
    let checked = check_with(&place, &[], Some("0012.500")).unwrap();
    assert!(!checked.pipeline.frozen().contains("0012.500"));
    including("site: {password: '${password}'}");
    check_with(&place, &[format!("password={PASSWORD}")], None).unwrap();
}

/// A test is in a pipeline file, too.
#[test]
fn a_test_gives_a_secret_no_text() {
    use flow_spec::{Style, load_for_test, load_tests};

    let place = Place::new();
    let registry = Registry::new(toys::kinds()).unwrap();
    let loaded = |value: &str| {
        place.pipeline(&format!(
            "{LOGIN}tests:\n  one: {{params: {{site: {{password: {value}}}}}, expect: {{login: {{rows: 0}}}}}}\n"
        ));
        let path = place.path("pipeline.yaml");
        let tests = load_tests(&path, &registry).unwrap();
        let overrides = Overrides {
            set: ["shards", "out"]
                .map(|name| format!("{name}={}", place.path(name).display()))
                .to_vec(),
            environment: Arc::new(|name| (name == "PASSWORD").then(|| PASSWORD.to_string())),
            ..Overrides::default()
        };
        load_for_test(&path, &overrides, &registry, &tests[0]).map_err(|found| found.render(Style::Plain))
    };
    let error = loaded(PASSWORD).err().unwrap();
    assert!(
        error.contains("`site.password` is secret, so a pipeline file cannot contain its value"),
        "{error}"
    );
    assert!(!error.contains(PASSWORD), "{error}");
    assert!(loaded("'${env:PASSWORD}'").is_ok());
}

/// Whatever is wrong with an overlay: its lines hold the value.
#[test]
fn messages_about_an_overlay_do_not_show_the_secrets_in_it() {
    use flow_spec::Style;

    let place = Place::new();
    place.pipeline(LOGIN);
    let set = ["shards", "out"].map(|name| format!("{name}={}", place.path(name).display()));
    let registry = Registry::new(toys::kinds()).unwrap();
    let said = |overlay: &str| {
        fs::write(place.path("overlay.yaml"), overlay).unwrap();
        let overrides = Overrides {
            configs: vec![place.path("overlay.yaml")],
            set: set.to_vec(),
            ..Overrides::default()
        };
        let found = load(&place.path("pipeline.yaml"), &overrides, &registry).err().unwrap();
        [Style::Plain, Style::Unicode, Style::Colour].map(|style| found.render(style))
    };
    let hidden = [
        // On the line of another mistake, and on the line before it.
        format!("flow: 1\nparams: {{site: {{password: {PASSWORD}}}, usr: ben}}\n"),
        format!("flow: 1\nparams:\n  site:\n    password: {PASSWORD}\n  usr: ben\n"),
        // Under a name that is perhaps misspelt, and where it does not belong.
        format!("flow: 1\nparams:\n  site:\n    pasword: {PASSWORD}\n"),
        format!("flow: 1\nparams:\n  site: {PASSWORD}\n"),
        format!("flow: 1\nparms: {{site: {{password: {PASSWORD}}}}}\n"),
        format!("params: {{site: {{password: {PASSWORD}}}}}\n"),
        format!("flow: 1\nparams: {{site: {{password: [{PASSWORD}, }}}}\n"),
    ];
    for overlay in hidden {
        for said in said(&overlay) {
            assert!(!said.contains(PASSWORD), "{overlay}: {said}");
            assert!(said.contains("overlay.yaml:"), "{overlay}: {said}");
        }
    }
    // Where there is no secret, the line is shown.
    for line in ["params: {user: [ben, ann]}", "params: {usr: ben}"] {
        let [plain, picture, _] = said(&format!("flow: 1\n{line}\n"));
        for said in [plain, picture] {
            assert!(said.contains(line), "{said}");
        }
    }
}

/// The name is perhaps the misspelt one of a secret.
#[test]
fn messages_about_an_include_do_not_show_values_of_unknown_names() {
    use flow_spec::Style;

    let place = Place::new();
    fs::write(place.path("inner.yaml"), LOGIN).unwrap();
    let registry = Registry::new(toys::kinds()).unwrap();
    for params in [format!("site: {{pasword: {PASSWORD}}}"), format!("site: {PASSWORD}")] {
        place.pipeline(&format!(
            "flow: 1\ninclude: {{inner: {{pipeline: inner.yaml, params: {{{params}}}}}}}\n"
        ));
        let path = place.path("pipeline.yaml");
        let found = load(&path, &Overrides::default(), &registry).err().unwrap();
        for style in [Style::Plain, Style::Unicode, Style::Colour] {
            let said = found.render(style);
            assert!(!said.contains(PASSWORD), "{params}: {said}");
            assert!(said.contains("pipeline.yaml:"), "{params}: {said}");
        }
    }
}

#[test]
fn a_secret_that_looks_like_a_path_is_not_rewritten() {
    let place = Place::new();
    let given = "${file_dir}/../pass";
    place.pipeline(&LOGIN.replace("user: \"${user}\"}", &format!("length: {}}}", given.len())));
    // The kind refuses a value of another length.
    check_with(&place, &[format!("site.password={given}")], None).unwrap();
    fs::write(
        place.path("overlay.yaml"),
        format!("flow: 1\nparams: {{site: {{password: \"{given}\"}}}}\n"),
    )
    .unwrap();
    let set = ["shards", "out"].map(|name| format!("{name}={}", place.path(name).display()));
    let overrides = Overrides {
        configs: vec![place.path("overlay.yaml")],
        set: set.to_vec(),
        ..Overrides::default()
    };
    let registry = Registry::new(toys::kinds()).unwrap();
    let pipeline = load(&place.path("pipeline.yaml"), &overrides, &registry).unwrap();
    check(pipeline, &registry).unwrap();
    // Six characters with the white space, and five without.
    let error = refusal(&place, &["site.password=hunt2 ".to_string()], None);
    assert!(error.contains("less than 6 characters"), "{error}");
}
