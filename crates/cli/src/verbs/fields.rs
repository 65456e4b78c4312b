//! Named values: the decoded form of a structure.

use std::fmt;
use std::io::{self, Write};

use offshoot_btrfs_format::TreeId;
use offshoot_btrfs_format::inode::Timespec;
use offshoot_vfs::Timestamp;
use serde::{Serialize, Serializer};
use uuid::Uuid;

use crate::output::{Escaped, json_name};

const NANOS_PER_SEC: u32 = 1_000_000_000;

/// One value.
pub(in crate::verbs) enum Value {
    /// A number.
    Number(u64),
    /// The id of a tree: a number in JSON, and otherwise the name of the tree if it has one.
    Tree(TreeId),
    /// Text of this program.
    Text(String),
    /// Bytes from the volume: a name, a label.
    Name(Vec<u8>),
    /// Several values.
    List(Vec<Value>),
    /// A nested structure.
    Fields(Fields),
}

/// Values with their names, in the order of the structure.
#[derive(Default)]
pub(in crate::verbs) struct Fields(pub(in crate::verbs) Vec<(&'static str, Value)>);

impl Fields {
    /// Adds a value.
    #[must_use]
    pub(in crate::verbs) fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.0.push((name, value.into()));
        self
    }

    /// Adds a name from the volume.
    #[must_use]
    pub(in crate::verbs) fn name(self, name: &'static str, bytes: &[u8]) -> Self {
        self.with(name, Value::Name(bytes.to_vec()))
    }

    /// Adds the id of a tree.
    #[must_use]
    pub(in crate::verbs) fn tree(self, name: &'static str, id: impl Into<u64>) -> Self {
        self.with(name, Value::Tree(TreeId(id.into())))
    }

    /// Adds a UUID.
    #[must_use]
    pub(in crate::verbs) fn uuid(self, name: &'static str, bytes: [u8; 16]) -> Self {
        self.with(name, Uuid::from_bytes(bytes).to_string())
    }

    /// Adds a time.
    #[must_use]
    pub(in crate::verbs) fn time(self, name: &'static str, time: &Timespec) -> Self {
        let (secs, nanos) = (time.seconds(), time.nsec.get());
        self.with(
            name,
            match nanos {
                0..NANOS_PER_SEC => Timestamp { secs, nanos }.decimal(),
                // The nanoseconds are out of range, so show both numbers to help find the damage.
                _ => format!("{secs} s and {nanos} ns"),
            },
        )
    }
}

impl Fields {
    /// Writes a line for each value, and one for each structure in a list.
    pub(in crate::verbs) fn print_lines(&self, out: &mut dyn Write) -> io::Result<()> {
        for (name, value) in &self.0 {
            match value {
                Value::List(list) if list.iter().any(|v| matches!(v, Value::Fields(_))) => {
                    for (at, value) in list.iter().enumerate() {
                        writeln!(out, "{:<24} {value}", format!("{name}[{at}]"))?;
                    }
                }
                value => writeln!(out, "{name:<24} {value}")?,
            }
        }
        Ok(())
    }
}

macro_rules! numbers {
    ($($type:ty),*) => {$(
        impl From<$type> for Value {
            fn from(number: $type) -> Self {
                Self::Number(u64::from(number))
            }
        }
    )*};
}

numbers!(u8, u16, u32, u64);

macro_rules! stored_numbers {
    ($format:ident: $($type:ident),*) => {$(
        impl From<$format::$type> for Value {
            fn from(number: $format::$type) -> Self {
                Self::Number(u64::from(number.get()))
            }
        }
    )*};
}

stored_numbers!(offshoot_btrfs_format: U16, U32, U64);
stored_numbers!(offshoot_xfs_format: U16, U32, U64);

impl From<String> for Value {
    fn from(text: String) -> Self {
        Self::Text(text)
    }
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<Fields> for Value {
    fn from(fields: Fields) -> Self {
        Self::Fields(fields)
    }
}

impl<T: Into<Value>> From<Vec<T>> for Value {
    fn from(list: Vec<T>) -> Self {
        Self::List(list.into_iter().map(Into::into).collect())
    }
}

impl fmt::Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number(number) => number.fmt(f),
            Self::Tree(id) => id.fmt(f),
            Self::Text(text) => f.write_str(text),
            Self::Name(name) => write!(f, "\"{}\"", Escaped(name)),
            Self::List(list) => {
                f.write_str("[")?;
                for (at, value) in list.iter().enumerate() {
                    write!(f, "{}{value}", if at > 0 { ", " } else { "" })?;
                }
                f.write_str("]")
            }
            Self::Fields(fields) => write!(f, "{{{fields}}}"),
        }
    }
}

impl fmt::Display for Fields {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (name, value)) in self.0.iter().enumerate() {
            write!(f, "{}{name}={value}", if at > 0 { " " } else { "" })?;
        }
        Ok(())
    }
}

impl Serialize for Value {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Number(number) => serializer.serialize_u64(*number),
            Self::Tree(id) => serializer.serialize_u64(id.0),
            Self::Text(text) => serializer.serialize_str(text),
            Self::Name(name) => serializer.serialize_str(&json_name(name)),
            Self::List(list) => serializer.collect_seq(list),
            Self::Fields(fields) => fields.serialize(serializer),
        }
    }
}

impl Serialize for Fields {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.0.iter().map(|(name, value)| (name, value)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Such a time caused an overflow, or in builds without overflow checks a wrong time.
    #[test]
    fn nanoseconds_beyond_a_second_are_shown_as_they_are() {
        let shown = |secs: i64, nanos: u32| {
            let bytes = [&secs.to_le_bytes()[..], &nanos.to_le_bytes()].concat();
            let time: &Timespec = zerocopy::FromBytes::ref_from_bytes(&bytes).unwrap();
            Fields::default().time("time", time).to_string()
        };
        assert_eq!(shown(-2, 1_500_000_000), "time=-2 s and 1500000000 ns");
        assert_eq!(shown(-2, u32::MAX), "time=-2 s and 4294967295 ns");
        assert_eq!(shown(7, 1_000_000_000), "time=7 s and 1000000000 ns");
        assert_eq!(shown(7, 999_999_999), "time=7.999999999");
        assert_eq!(shown(-2, 500_000_000), "time=-1.500000000");
    }

    #[test]
    fn both_forms() {
        let fields = Fields::default()
            .with("number", 7u64)
            .tree("tree", 7u64)
            .name("name", b"a\x1b\xff")
            .with("list", vec![Fields::default().with("x", 1u8), Fields::default()]);
        assert_eq!(
            fields.to_string(),
            "number=7 tree=CSUM_TREE name=\"a\\u{1b}\\xff\" list=[{x=1}, {}]"
        );
        let json = serde_json::to_string(&fields).unwrap();
        assert_eq!(
            json,
            "{\"number\":7,\"tree\":7,\"name\":\"a\\u001b\\\\xff\",\"list\":[{\"x\":1},{}]}"
        );
    }
}
