//! `offshoot dump tree`: shows all items of a tree, in key order.

use std::io::{self, Write};
use std::ops::ControlFlow;
use std::sync::Arc;

use offshoot_btrfs_format::{ItemType, Key, TreeId};
use serde::Serialize;

use super::items::{self, ItemOrigin};
use crate::args::DumpTreeArguments;
use crate::exit::{Result, VerbFailure};
use crate::output::{Console, Escaped, write_line};
use crate::session::Session;
use crate::verbs::fields::Fields;

const NAMES: [(&str, TreeId); 13] = [
    ("root", TreeId::ROOT),
    ("extent", TreeId::EXTENT),
    ("chunk", TreeId::CHUNK),
    ("dev", TreeId::DEV),
    ("device", TreeId::DEV),
    ("fs", TreeId::FS),
    ("csum", TreeId::CSUM),
    ("quota", TreeId::QUOTA),
    ("uuid", TreeId::UUID),
    ("free-space", TreeId::FREE_SPACE),
    ("block-group", TreeId::BLOCK_GROUP),
    ("raid-stripe", TreeId::RAID_STRIPE),
    ("data-reloc", TreeId::DATA_RELOC),
];

#[derive(Serialize)]
struct ItemLine<'a> {
    /// The subvolume, if the item is in a log.
    #[serde(skip_serializing_if = "Option::is_none")]
    subvolume: Option<u64>,
    key: JsonKey,
    size: usize,
    item: &'a Fields,
}

#[derive(Serialize)]
struct JsonKey {
    objectid: u64,
    r#type: String,
    offset: u64,
}

pub(super) fn run(
    arguments: &DumpTreeArguments,
    out: &mut dyn Write,
    console: &Arc<Console>,
) -> Result {
    let id = tree_id(&arguments.tree)?;
    let session = Session::open_stored(&arguments.volume, console)?;
    let root = session.volume.tree(id)?;
    let source = ItemOrigin { tree: id, sector_size: session.volume.superblock().sector_size };
    let mut written = Ok(());
    session.volume.for_each_item(root, Key::MIN, |key, data| {
        written = write_item(out, source, None, key, data, arguments.json);
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(_) => ControlFlow::Break(()),
        }
    })?;
    written.map_err(VerbFailure::Output)
}

/// Writes an item, of a tree or of the log of a subvolume.
pub(super) fn write_item(
    out: &mut dyn Write,
    source: ItemOrigin,
    subvolume: Option<u64>,
    key: Key,
    data: &[u8],
    is_json: bool,
) -> io::Result<()> {
    // The block was checked when it was read, so an item that cannot be decoded is of a kind that
    // the check examines less closely than this dump.
    let item = items::decode(source, key, data)
        .unwrap_or_else(|malformed| Fields::default().with("malformed", malformed.to_string()));
    if is_json {
        let key = JsonKey {
            objectid: key.objectid,
            r#type: type_name(key.item_type),
            offset: key.offset,
        };
        return Ok(write_line(out, &ItemLine { subvolume, key, size: data.len(), item: &item })?);
    }
    write!(out, "{} size={}", items::ShownKey { tree: source.tree, key }, data.len())?;
    if item.0.is_empty() { writeln!(out) } else { writeln!(out, " {item}") }
}

fn type_name(item_type: ItemType) -> String {
    item_type.to_string()
}

/// The tree of btrfs with this number or name.
pub(in crate::verbs) fn tree_id(text: &str) -> Result<TreeId> {
    if let Ok(id) = text.parse() {
        return Ok(TreeId(id));
    }
    let found = NAMES.iter().find(|(name, _)| name.eq_ignore_ascii_case(text));
    found.map(|(_, id)| *id).ok_or_else(|| {
        VerbFailure::Usage(format!(
            "no tree of btrfs is called {}; {}",
            Escaped(text.as_bytes()),
            tree_names()
        ))
    })
}

/// What names a tree of btrfs, for errors.
pub(in crate::verbs) fn tree_names() -> String {
    let names: Vec<&str> = NAMES.iter().map(|(name, _)| *name).collect();
    format!("those of btrfs are {}, and a number names any tree", names.join(", "))
}
