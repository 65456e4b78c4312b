//! What `offshoot repair --class overlaps` says of the items that it cuts, drops and corrects.

use std::io::Write;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, FileWithChanges, ItemChange, ItemChanges,
};
use offshoot_btrfs_format::Key;
use serde_json::json;

use crate::exit::Result;
use crate::output::{Escaped, json_name};

/// The most changes that are shown of a file. JSON has all.
const MOST_LINES: usize = 20;

/// Says that there is something that the class overlaps may mend.
pub(super) fn write_choice(rest: &[BtrfsFinding], out: &mut dyn Write) -> Result {
    let is_it = |finding: &BtrfsFinding| match finding.place {
        BtrfsFindingPlace::Block { tree, .. } => {
            finding.code == BtrfsFindingCode::TreeBlock && tree.is_subvolume()
        }
        _ => finding.code == BtrfsFindingCode::FileExtent,
    };
    if rest.iter().any(is_it) {
        writeln!(
            out,
            "--dry-run --class overlaps says what of overlapping extents and of leaves with a \
             right checksum could be kept"
        )?;
    }
    Ok(())
}

/// Says what becomes of items.
pub(super) fn write(changes: &ItemChanges, is_written: bool, out: &mut dyn Write) -> Result {
    let would = if is_written { "" } else { "would be " };
    for FileWithChanges { subvolume, ino, path, changes } in &changes.files {
        let name = match path {
            Some(path) => Escaped(path).to_string(),
            None => format!("inode {ino} of the subvolume {}", subvolume.0),
        };
        for change in changes.iter().take(MOST_LINES) {
            match change {
                ItemChange::Cut { offset, len, generation, .. } => writeln!(
                    out,
                    "{would}cut: {name}: {len} bytes at {offset} of the extent of transaction \
                     {generation}, which gives way to another one"
                )?,
                ItemChange::Dropped { key, problem } => {
                    let problem = Escaped(problem.as_bytes());
                    writeln!(out, "{would}dropped: {name}: {key}: {problem}")?;
                }
                ItemChange::Corrected { key, problem } => {
                    let problem = Escaped(problem.as_bytes());
                    writeln!(out, "{would}corrected: {name}: {key}: {problem}")?;
                }
            }
        }
        let more = changes.len().saturating_sub(MOST_LINES);
        if more > 0 {
            writeln!(out, "  and {more} other changes of {name}; --json lists them")?;
        }
    }
    if changes.are_more {
        writeln!(out, "more items are changed than are named here")?;
    }
    Ok(())
}

/// What becomes of items.
pub(super) fn as_json(changes: &ItemChanges) -> serde_json::Value {
    let numbers = |key: &Key| [key.objectid, u64::from(key.item_type.0), key.offset];
    let change = |change: &ItemChange| match change {
        ItemChange::Cut { offset, len, generation, logical } => json!({
            "what": "cut",
            "offset": offset,
            "length": len,
            "generation": generation.0,
            "logical": logical.map(|logical| logical.0),
        }),
        ItemChange::Dropped { key, problem } => {
            json!({ "what": "dropped", "key": numbers(key), "problem": problem })
        }
        ItemChange::Corrected { key, problem } => {
            json!({ "what": "corrected", "key": numbers(key), "problem": problem })
        }
    };
    let file = |file: &FileWithChanges| {
        json!({
            "subvolume": file.subvolume.0,
            "inode": file.ino,
            "path": file.path.as_deref().map(json_name),
            "changes": file.changes.iter().map(change).collect::<Vec<_>>(),
        })
    };
    changes.files.iter().map(file).collect()
}
