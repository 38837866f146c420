//! Reference checkpoints as editable tensors, for tests that break them.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use longstraw::model::spec::{Expected, Spec};
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde_json::{Map, Value, json};

/// The folder of a family's reference checkpoint.
pub(crate) fn case(family: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/cases").join(family).join("base")
}

/// One tensor of a file.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Stored {
    pub(crate) dtype: Dtype,
    pub(crate) shape: Vec<usize>,
    pub(crate) bytes: Vec<u8>,
}

impl Stored {
    pub(crate) fn float(shape: &[usize], values: &[f32]) -> Stored {
        let bytes = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        Stored { dtype: Dtype::F32, shape: shape.to_vec(), bytes }
    }

    pub(crate) fn floats(&self) -> Vec<f32> {
        self.bytes.chunks(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    }

    pub(crate) fn set(&mut self, element: usize, value: f32) {
        self.bytes[4 * element..4 * element + 4].copy_from_slice(&value.to_le_bytes());
    }
}

pub(crate) type Tensors = BTreeMap<String, Stored>;

pub(crate) fn read(file: &Path) -> Tensors {
    let bytes = fs::read(file).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let stored = |view: TensorView<'_>| Stored {
        dtype: view.dtype(),
        shape: view.shape().to_vec(),
        bytes: view.data().to_vec(),
    };
    tensors.tensors().into_iter().map(|(name, view)| (name, stored(view))).collect()
}

pub(crate) fn write(file: &Path, tensors: &Tensors) {
    let views = tensors
        .iter()
        .map(|(name, stored)| (name, TensorView::new(stored.dtype, stored.shape.clone(), &stored.bytes).unwrap()));
    fs::write(file, safetensors::serialize(views, None).unwrap()).unwrap();
}

/// A copy of a reference checkpoint whose config and tensors may be changed before it is written.
pub(crate) struct Draft {
    pub(crate) folder: tempfile::TempDir,
    pub(crate) config: Map<String, Value>,
    pub(crate) tensors: Tensors,
}

impl Draft {
    pub(crate) fn of(family: &str) -> Draft {
        let config = serde_json::from_slice(&fs::read(case(family).join("config.json")).unwrap()).unwrap();
        let tensors = read(&case(family).join("model.safetensors"));
        Draft { folder: tempfile::tempdir().unwrap(), config, tensors }
    }

    /// A checkpoint of `config` with values of its own in every place: small, none of them zero, dealt by name.
    pub(crate) fn made_of(config: &Value) -> Draft {
        let config = config.as_object().unwrap().clone();
        let spec = Spec::from_config(&config, None, Path::new("config.json")).unwrap();
        let stored = |expected: Expected| {
            let shape: Vec<usize> = expected.shape.iter().map(|size| usize::try_from(*size).unwrap()).collect();
            let first: u32 = expected.name.bytes().fold(7, |sum, byte| sum.wrapping_mul(31).wrapping_add(byte.into()));
            let count = u32::try_from(expected.elements()).unwrap();
            let value = |i: u32| f32::from_bits(0x3e00_0000 | (first.wrapping_add(i).wrapping_mul(2_654_435_761) >> 9));
            (expected.name, Stored::float(&shape, &(0..count).map(value).collect::<Vec<f32>>()))
        };
        let tensors = spec.tensors().into_iter().map(stored).collect();
        Draft { folder: tempfile::tempdir().unwrap(), config, tensors }
    }

    /// Puts fp8 weights in the place of all linear layers' weights: every byte that is a number, and factors of their own for
    /// each block of 128 by 128, multiples of about `factor`.
    pub(crate) fn linears_in_fp8(&mut self, factor: f32) {
        let spec = Spec::from_config(&self.config, None, Path::new("config.json")).unwrap();
        for (number, linear) in spec.linear_layers().iter().enumerate() {
            let name = format!("{}.weight", linear.module);
            let shape = self.tensors[&name].shape.clone();
            let byte = |i: usize| {
                let byte = u8::try_from((i * 37 + number * 11) % 256).unwrap();
                if byte & 127 == 127 { 3 } else { byte }
            };
            let bytes: Vec<u8> = (0..shape[0] * shape[1]).map(byte).collect();
            let grid = [shape[0].div_ceil(128), shape[1].div_ceil(128)];
            let number = u16::try_from(number % 5).unwrap();
            let own = |i: usize| factor * f32::from(u16::try_from(1 + i).unwrap() + number);
            let factors: Vec<f32> = (0..grid[0] * grid[1]).map(own).collect();
            self.tensors.insert(name.clone(), Stored { dtype: Dtype::F8_E4M3, shape, bytes });
            self.tensors.insert(format!("{name}_scale_inv"), Stored::float(&grid, &factors));
        }
        let form = json!({
            "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]
        });
        self.config.insert("quantization_config".to_owned(), form);
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The tensor `name`, to be changed.
    pub(crate) fn tensor(&mut self, name: &str) -> &mut Stored {
        self.tensors.get_mut(name).unwrap()
    }

    pub(crate) fn write_config(&self) {
        fs::write(self.path().join("config.json"), serde_json::to_vec(&self.config).unwrap()).unwrap();
    }

    /// As one file.
    pub(crate) fn write(&self) {
        self.write_config();
        write(&self.path().join("model.safetensors"), &self.tensors);
    }

    /// As `count` shards with an index; tensors are dealt in turn. Returns the index.
    pub(crate) fn write_shards(&self, count: usize) -> Map<String, Value> {
        self.write_config();
        let mut shards = vec![Tensors::new(); count];
        let mut index = Map::new();
        for (i, (name, stored)) in self.tensors.iter().enumerate() {
            shards[i % count].insert(name.clone(), stored.clone());
            index.insert(name.clone(), Value::from(shard_name(i % count, count)));
        }
        for (i, shard) in shards.iter().enumerate() {
            write(&self.path().join(shard_name(i, count)), shard);
        }
        self.write_index(&index);
        index
    }

    pub(crate) fn write_index(&self, index: &Map<String, Value>) {
        let text = serde_json::to_vec(&json!({"metadata": {}, "weight_map": index})).unwrap();
        fs::write(self.path().join("model.safetensors.index.json"), text).unwrap();
    }
}

pub(crate) fn shard_name(shard: usize, count: usize) -> String {
    format!("model-{:05}-of-{count:05}.safetensors", shard + 1)
}
