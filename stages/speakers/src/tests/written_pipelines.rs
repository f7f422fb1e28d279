//! For tests: pipelines in folders as pyannote publishes them, of weights that are given.

use std::path::Path;

use crate::formula::{self, Tensors};

/// The configuration of speaker-diarization-3.1, with networks at these places.
pub fn config_3_1(segmentation: &str, embedding: &str) -> String {
    format!(
        "version: 3.1.0\n\
         pipeline:\n\
         \x20 name: pyannote.audio.pipelines.SpeakerDiarization\n\
         \x20 params:\n\
         \x20   clustering: AgglomerativeClustering\n\
         \x20   embedding: {embedding}\n\
         \x20   embedding_batch_size: 32\n\
         \x20   embedding_exclude_overlap: true\n\
         \x20   segmentation: {segmentation}\n\
         \x20   segmentation_batch_size: 32\n\
         params:\n\
         \x20 clustering:\n\
         \x20   method: centroid\n\
         \x20   min_cluster_size: 12\n\
         \x20   threshold: 0.7045654963945799\n\
         \x20 segmentation:\n\
         \x20   min_duration_off: 0.0\n"
    )
}

/// That of speaker-diarization-community-1.
pub const CONFIG_COMMUNITY_1: &str = "\
dependencies:
  pyannote.audio: 4.0.0
pipeline:
  name: pyannote.audio.pipelines.SpeakerDiarization
  params:
    clustering: VBxClustering
    segmentation: $model/segmentation
    segmentation_batch_size: 32
    embedding: $model/embedding
    embedding_batch_size: 32
    embedding_exclude_overlap: true
    plda: $model/plda
params:
  clustering:
    threshold: 0.6
    Fa: 0.07
    Fb: 0.8
  segmentation:
    min_duration_off: 0.0
";

/// Writes a file with the folders above it.
pub fn put(path: &Path, bytes: impl AsRef<[u8]>) {
    std::fs::create_dir_all(path.parent().unwrap()).unwrap();
    std::fs::write(path, bytes).unwrap();
}

/// The pipeline 3.1 in a folder, its networks in folders of it as PyTorch checkpoints, or as safetensors.
pub fn pipeline_3_1(folder: &Path, segmentation: &Tensors, embedding: &Tensors, checkpoints: bool) {
    put(
        &folder.join("config.yaml"),
        config_3_1("networks/segmentation", "networks/embedding"),
    );
    for (name, tensors) in [("segmentation", segmentation), ("embedding", embedding)] {
        let folder = folder.join("networks").join(name);
        match checkpoints {
            true => put(&folder.join("pytorch_model.bin"), checkpoint(tensors)),
            false => put(&folder.join("model.safetensors"), formula::file(tensors)),
        }
    }
}

/// The pipeline community-1 in a folder.
pub fn community_1(folder: &Path, segmentation: &Tensors, embedding: &Tensors, plda: &Tensors) {
    put(&folder.join("config.yaml"), CONFIG_COMMUNITY_1);
    put(&folder.join("segmentation/pytorch_model.bin"), checkpoint(segmentation));
    put(&folder.join("embedding/pytorch_model.bin"), checkpoint(embedding));
    let arrays = |names: [&str; 3]| {
        let member = |name: &str| {
            let (shape, values) = &plda[name];
            (format!("{name}.npy"), npy(shape, values))
        };
        zip(&names.map(member))
    };
    put(
        &folder.join("plda/xvec_transform.npz"),
        arrays(["mean1", "mean2", "lda"]),
    );
    put(&folder.join("plda/plda.npz"), arrays(["mu", "tr", "psi"]));
}

fn put_text(pickle: &mut Vec<u8>, text: &str) {
    pickle.push(b'X');
    pickle.extend((text.len() as u32).to_le_bytes());
    pickle.extend(text.bytes());
}

fn put_number(pickle: &mut Vec<u8>, number: usize) {
    pickle.push(b'J');
    pickle.extend((number as u32).to_le_bytes());
}

/// A checkpoint as Lightning writes it: the state dictionary beside an object of pyannote's.
pub fn checkpoint(tensors: &Tensors) -> Vec<u8> {
    let mut pickle = b"\x80\x02}(".to_vec();
    put_text(&mut pickle, "state_dict");
    pickle.extend(b"ccollections\nOrderedDict\n)R(");
    for (number, (name, (shape, values))) in tensors.iter().enumerate() {
        put_text(&mut pickle, name);
        pickle.extend(b"ctorch._utils\n_rebuild_tensor_v2\n((");
        put_text(&mut pickle, "storage");
        pickle.extend(b"ctorch\nFloatStorage\n");
        put_text(&mut pickle, &number.to_string());
        put_text(&mut pickle, "cpu");
        put_number(&mut pickle, values.len());
        pickle.extend(b"tQ");
        put_number(&mut pickle, 0);
        pickle.push(b'(');
        shape.iter().for_each(|&size| put_number(&mut pickle, size));
        pickle.extend(b"t(");
        let stride = |axis: usize| shape[axis + 1..].iter().product();
        (0..shape.len()).for_each(|axis| put_number(&mut pickle, stride(axis)));
        pickle.extend(b"t\x89ccollections\nOrderedDict\n)RtR");
    }
    pickle.push(b'u');
    put_text(&mut pickle, "pyannote.audio");
    pickle.extend(b"cpyannote.audio.core.task\nProblem\nK\x01\x85Ru.");
    let mut members = vec![("archive/data.pkl".to_owned(), pickle)];
    for (number, (_, values)) in tensors.values().enumerate() {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        members.push((format!("archive/data/{number}"), bytes));
    }
    zip(&members)
}

/// An array of NumPy, of f32.
pub fn npy(shape: &[usize], values: &[f32]) -> Vec<u8> {
    let sizes: Vec<String> = shape.iter().map(|size| format!("{size},")).collect();
    let header = format!(
        "{{'descr': '<f4', 'fortran_order': False, 'shape': ({}), }}\n",
        sizes.join(" ")
    );
    let mut bytes = b"\x93NUMPY\x01\0".to_vec();
    bytes.extend((header.len() as u16).to_le_bytes());
    bytes.extend(header.bytes());
    bytes.extend(values.iter().flat_map(|value| value.to_le_bytes()));
    bytes
}

/// A zip file of stored members. Checksums, which are not looked at, are zero.
pub fn zip(members: &[(String, Vec<u8>)]) -> Vec<u8> {
    let (mut file, mut directory) = (Vec::new(), Vec::new());
    for (name, contents) in members {
        let start = file.len() as u32;
        // What both headers have: flags, method, time, date, checksum, lengths, those of the name and of what is extra.
        let mut fields = vec![0; 12];
        fields.extend((contents.len() as u32).to_le_bytes());
        fields.extend((contents.len() as u32).to_le_bytes());
        fields.extend((name.len() as u16).to_le_bytes());
        fields.extend([0, 0]);
        file.extend([b"PK\x03\x04\x14\0", &fields[..], name.as_bytes(), contents].concat());
        directory.extend(
            [
                b"PK\x01\x02\x14\0\x14\0",
                &fields[..],
                &[0; 10],
                &start.to_le_bytes(),
                name.as_bytes(),
            ]
            .concat(),
        );
    }
    let mut end = b"PK\x05\x06\0\0\0\0".to_vec();
    let count = (members.len() as u16).to_le_bytes();
    end.extend([count, count].concat());
    end.extend((directory.len() as u32).to_le_bytes());
    end.extend((file.len() as u32).to_le_bytes());
    end.extend([0, 0]);
    [file, directory, end].concat()
}
