use super::*;

fn text(text: &str) -> Vec<u8> {
    [b"X", &(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A tensor of so many dimensions, with these names of its storage and its class.
fn tensor(dimensions: usize, key: &str, class: &str) -> Vec<u8> {
    [
        &b"ctorch._utils\n_rebuild_tensor_v2\n(("[..],
        &text("storage"),
        b"c",
        class.as_bytes(),
        b"\n",
        &text(key),
        &text("cpu"),
        b"K\x01tQK\x00(",
        &b"K\x01".repeat(dimensions),
        b"t(",
        &b"K\x01".repeat(dimensions),
        b"t\x89NtR",
    ]
    .concat()
}

/// A state dictionary of one tensor of this name.
fn dictionary(name: &str, tensor: &[u8]) -> Vec<u8> {
    [b"\x80\x02}(", &text(name)[..], tensor, b"u."].concat()
}

fn tensors(bytes: &[u8]) -> Result<Vec<(&str, StoredTensor<'_>)>, String> {
    Pickle::read(bytes)?.state_dict()
}

#[test]
fn a_tensor_is_of_a_storage_of_torch() {
    let good = dictionary("n", &tensor(3, "0", "torch\nFloatStorage"));
    let found = tensors(&good).unwrap();
    let expected = StoredTensor {
        storage: "FloatStorage",
        key: "0",
        offset: 0,
        shape: vec![1; 3],
        strides: vec![1; 3],
    };
    assert_eq!(found, [("n", expected)]);
    for class in [
        "torch.cuda\nFloatStorage",
        "\nFloatStorage",
        "os\nsystem",
        "torch.FloatStorage\n",
    ] {
        let why = tensors(&dictionary("n", &tensor(3, "0", class))).unwrap_err();
        assert!(why.contains("not a plain tensor"), "{class}: {why}");
    }
    // A name of a class that is not UTF-8.
    let at = good.windows(5).position(|bytes| bytes == b"Float").unwrap();
    let mut bad = good.clone();
    bad[at] = 0xff;
    assert!(tensors(&bad).unwrap_err().contains("not UTF-8"));
}

#[test]
fn what_is_long_cannot_be_said_again_and_again() {
    let class = "torch\nFloatStorage";
    assert!(tensors(&dictionary("n", &tensor(100_000, "0", class))).is_err());
    // Long names are not copied: what is found is in the bytes.
    let (name, long_class) = ("n".repeat(2000), "F".repeat(2000));
    let bytes = dictionary(&name, &tensor(3, &name, &format!("torch\n{long_class}")));
    let within = |text: &str| bytes.as_ptr_range().contains(&text.as_ptr());
    let found = tensors(&bytes).unwrap();
    let (found_name, stored) = (found[0].0, &found[0].1);
    assert_eq!((found_name, stored.key, stored.storage), (&*name, &*name, &*long_class));
    assert!(within(found_name) && within(stored.key) && within(stored.storage));
    // One text, named as module and name again and again.
    let mut global = [&b"\x80\x04"[..], &text(&"m".repeat(500_000)), b"q\x00"].concat();
    global.extend(b"h\x00h\x00\x93".repeat(10_000));
    assert!(Pickle::read(&global).is_err(), "it has no end");
    global.push(b'.');
    let pickle = Pickle::read(&global).unwrap();
    assert_eq!(pickle.nodes.len(), 10_001);
    let within = |text: &str| global.as_ptr_range().contains(&text.as_ptr());
    let globals = pickle.nodes.iter().filter_map(|node| match node {
        Node::Global(module, name) => Some(within(module) && within(name)),
        _ => None,
    });
    assert!(globals.eq(std::iter::repeat_n(true, 10_000)));
    assert!(pickle.state_dict().is_err());
    // One long value of hyper-parameters.
    let mut value = [
        &b"\x80\x02}("[..],
        &text("hyper_parameters"),
        b"(",
        &text(&"v".repeat(500_000)),
        b"q\x00",
    ]
    .concat();
    value.extend(b"h\x00".repeat(40_000));
    value.extend(b"lu.");
    assert!(Pickle::read(&value).unwrap().hyper_parameters().is_err());
}

/// One object with many attributes, none of which is a value, again and again.
#[test]
fn attributes_are_not_looked_through_again_and_again() {
    let said = |attributes: usize, times: usize| {
        let mut bytes = [&b"\x80\x02}("[..], &text("hyper_parameters"), b"(cm\nn\n)R}("].concat();
        bytes.extend(b"K\x01N".repeat(attributes));
        bytes.extend(b"ubq\x00");
        bytes.extend(b"h\x00".repeat(times - 1));
        bytes.extend(b"lu.");
        Pickle::read(&bytes).unwrap().hyper_parameters()
    };
    assert_eq!(said(10, 1000), Ok(Some(Value::Sequence(vec![Value::Null; 1000]))));
    assert!(said(200_000, 1).is_ok());
    assert!(said(200_000, 1000).unwrap_err().contains("too long"));
}

#[test]
fn a_tensor_may_have_many_names_and_a_name_one_tensor() {
    let key = "0".repeat(500_000);
    let stored = tensor(3, &key, "torch\nFloatStorage");
    // The tensor is in the memo before the dictionary is made.
    let before = [b"\x80\x02", &stored[..], b"q\x000}("].concat();
    let mut many = before.clone();
    for number in 0..10_000 {
        many.extend([&text(&number.to_string())[..], b"h\x00"].concat());
    }
    many.extend(b"u.");
    let found = tensors(&many).unwrap();
    assert_eq!(found.len(), 10_000);
    assert_eq!((found[0].0, found[9_999].0), ("0", "9999"));
    // All have the one key of the file.
    assert!(
        found
            .iter()
            .all(|(_, tensor)| tensor.key.as_ptr() == found[0].1.key.as_ptr())
    );
    assert!(many.as_ptr_range().contains(&found[0].1.key.as_ptr()));
    let name = "n".repeat(1000);
    let mut same = [&before[..], &text(&name), b"q\x01h\x00"].concat();
    same.extend(b"h\x01h\x00".repeat(10_000));
    same.extend(b"u.");
    let why = tensors(&same).unwrap_err();
    assert!(
        why.contains("two tensors of the name `nnn") && why.len() < 1100,
        "{why}"
    );
}

/// An instruction of one byte makes a value of many: a small file must not fill the memory.
#[test]
fn a_pickle_has_so_many_values() {
    let too_many = MAX_NODES + 2;
    for (what, instructions) in [
        ("nodes", vec![b'N'; too_many]),
        ("nodes that are dropped", b"N0".repeat(too_many)),
        ("a memo", [&b"N"[..], &vec![0x94; too_many]].concat()),
        ("a stack", [&b"Nq\x00"[..], &b"h\x00".repeat(too_many)].concat()),
    ] {
        let bytes = [&b"\x80\x02"[..], &instructions, b"."].concat();
        let why = Pickle::read(&bytes).map(drop).unwrap_err();
        assert!(why.contains("more than 2000000 values"), "{what}: {why}");
    }
}
