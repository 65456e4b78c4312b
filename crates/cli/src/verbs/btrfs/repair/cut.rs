//! What `offshoot repair --cut-off` says of the subvolumes that it cuts blocks off.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;

use offshoot_btrfs::{
    BtrfsFinding, BtrfsFindingCode, BtrfsFindingPlace, CutOff, CutOffBlock, CutOffFile,
    RepairOutcome, SubvolumeName,
};
use offshoot_btrfs_format::{Key, TreeId};
use serde_json::json;

use crate::exit::Result;
use crate::output::{Escaped, json_name};

/// The most blocks, and the most files, that are shown of a subvolume. JSON has all.
const MOST_LINES: usize = 20;

/// A subvolume as the user named it. A path that is a number is told from an id by a leading `/`.
pub(super) fn parse_name(name: &OsStr) -> SubvolumeName {
    match name.to_str().and_then(|name| name.parse().ok()) {
        Some(id) => SubvolumeName::Id(TreeId(id)),
        None => SubvolumeName::Path(name.as_bytes().to_vec()),
    }
}

/// Whether a finding is about a block that was cut off.
pub(super) fn is_cut_off(finding: &BtrfsFinding, outcome: &RepairOutcome) -> bool {
    matches!(finding.place, BtrfsFindingPlace::Block { tree, .. }
        if outcome.cut_off.iter().any(|cut| cut.subvolume == tree))
}

/// Says which trees have blocks that could be cut off, or what helps against lost roots.
pub(super) fn write_choice(rest: &[BtrfsFinding], out: &mut dyn Write) -> Result {
    let lost = rest.iter().filter(|finding| finding.code == BtrfsFindingCode::TreeBlock);
    let trees = lost.filter_map(|finding| match finding.place {
        BtrfsFindingPlace::Block { tree, .. } => Some(tree),
        _ => None,
    });
    let mut trees: BTreeSet<_> = trees.collect();
    if trees.contains(&TreeId::ROOT) {
        let step = "repair --scan looks for an older state that is whole";
        writeln!(out, "get out the files with recover; {step}")?;
    }
    trees.retain(|tree| CutOff::is_possible(*tree));
    if !trees.is_empty() {
        let options: Vec<_> = trees.iter().map(|tree| format!("--cut-off {}", tree.0)).collect();
        let options = options.join(" ");
        writeln!(out, "get out the files with extract; {options} then gives up the lost blocks")?;
    }
    Ok(())
}

/// Says what is lost of a subvolume.
pub(super) fn write(cut: &CutOff, is_written: bool, out: &mut dyn Write) -> Result {
    let (id, count) = (cut.subvolume.0, cut.block_count);
    let (would, becomes) =
        if is_written { ("", "is empty now") } else { ("would be ", "would become empty") };
    let name = match &cut.path {
        Some(path) => format!("subvolume {id} ({})", Escaped(path)),
        None if cut.subvolume.is_subvolume() => format!("subvolume {id}"),
        None => format!("tree {}", cut.subvolume),
    };
    let blocks = if count == 1 { "1 block" } else { &format!("{count} blocks") };
    if cut.is_emptied {
        writeln!(out, "{would}cut off: {blocks} of the {name}, which {becomes}")?;
    } else {
        writeln!(out, "{would}cut off: {blocks} of the {name}")?;
    }
    for CutOffBlock { logical, level, first, behind } in cut.blocks.iter().take(MOST_LINES) {
        let end = behind.map_or_else(|| "its end".to_owned(), |key| key.to_string());
        writeln!(out, "  block {logical} of level {level}: from {first} to {end}")?;
    }
    for CutOffFile { ino, path, is_gone } in cut.files.iter().take(MOST_LINES) {
        let path = path.as_ref().map(|path| format!(" ({})", Escaped(path))).unwrap_or_default();
        let what = if *is_gone { "the inode is lost" } else { "may lack a part" };
        writeln!(out, "  inode {ino}{path}: {what}")?;
    }
    let more = cut.files.len().saturating_sub(MOST_LINES);
    if more > 0 {
        let or_more = if cut.are_more { ", or more," } else { "" };
        writeln!(out, "  and {more} others{or_more} lost something; --json lists them")?;
    }
    Ok(())
}

/// What is lost of a subvolume.
pub(super) fn as_json(cut: &CutOff) -> serde_json::Value {
    let name = |path: &Option<Vec<u8>>| path.as_ref().map(|path| json_name(path));
    let numbers = |key: Key| [key.objectid, u64::from(key.item_type.0), key.offset];
    let block = |block: &CutOffBlock| {
        json!({
            "logical": block.logical.0,
            "level": block.level,
            "first": numbers(block.first),
            "behind": block.behind.map(numbers),
        })
    };
    let file = |file: &CutOffFile| json!({ "inode": file.ino, "path": name(&file.path), "gone": file.is_gone });
    json!({
        "subvolume": cut.subvolume.0,
        "path": name(&cut.path),
        "emptied": cut.is_emptied,
        "lost_blocks": cut.block_count,
        "blocks": cut.blocks.iter().map(block).collect::<Vec<_>>(),
        "files": cut.files.iter().map(file).collect::<Vec<_>>(),
        "more": cut.are_more,
    })
}
