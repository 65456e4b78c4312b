//! What `-O` names.

use std::io::Write;

use offshoot_btrfs::MkfsFeatures;
use offshoot_btrfs_format::superblock::{CompatRo, Incompat};

use crate::exit::Result;
use crate::verbs::mkfs::usage;

/// A feature that new volumes can have.
struct NamedFeature {
    name: &'static str,
    alias: Option<&'static str>,
    what: &'static str,
    incompat: Incompat,
    compat_ro: CompatRo,
}

/// All of them, in the order of the kernels that brought them.
const FEATURES: [NamedFeature; 7] = [
    incompat("mixed-bg", "data and metadata share block groups", Incompat::MIXED_GROUPS),
    incompat("extref", "more hard links to a file in one directory", Incompat::EXTENDED_IREF),
    incompat("skinny-metadata", "small references to tree blocks", Incompat::SKINNY_METADATA),
    incompat("no-holes", "holes of files without extents", Incompat::NO_HOLES),
    compat_ro("free-space-tree", "fst", "free space in a tree", CompatRo::FREE_SPACE_TREE),
    incompat("raid1c34", "RAID1 with 3 or 4 copies, of the profiles", Incompat::RAID1C34),
    compat_ro(
        "block-group-tree",
        "bgt",
        "block groups in a tree of their own",
        CompatRo::BLOCK_GROUP_TREE,
    ),
];

const fn incompat(name: &'static str, what: &'static str, incompat: Incompat) -> NamedFeature {
    NamedFeature { name, alias: None, what, incompat, compat_ro: CompatRo(0) }
}

const fn compat_ro(
    name: &'static str,
    alias: &'static str,
    what: &'static str,
    compat_ro: CompatRo,
) -> NamedFeature {
    NamedFeature { name, alias: Some(alias), what, incompat: Incompat(0), compat_ro }
}

/// The word that asks for the list.
pub(super) const LIST: &str = "list-all";

/// Writes which features there are.
pub(super) fn list(out: &mut dyn Write) -> Result {
    writeln!(out, "Filesystem features available:")?;
    let usual = names(usual().incompat, usual().compat_ro);
    for NamedFeature { name, alias, what, .. } in &FEATURES {
        let mark = if usual.contains(name) { " (default)" } else { "" };
        writeln!(out, "{name:<20}- {what}{mark}")?;
        if let Some(alias) = alias {
            writeln!(out, "{alias:<20}- the same")?;
        }
    }
    Ok(())
}

/// The features of a volume by their names.
pub(super) fn names(incompat: Incompat, compat_ro: CompatRo) -> Vec<&'static str> {
    let is_on = |feature: &&NamedFeature| {
        (feature.incompat.0 != 0 && incompat.has(feature.incompat))
            || (feature.compat_ro.0 != 0 && compat_ro.has(feature.compat_ro))
    };
    FEATURES.iter().filter(is_on).map(|feature| feature.name).collect()
}

/// The features of a new volume, unless others are asked for: see the essay of the parent.
fn usual() -> MkfsFeatures {
    let features = MkfsFeatures::default();
    let compat_ro = features.compat_ro.without(CompatRo::BLOCK_GROUP_TREE);
    MkfsFeatures { compat_ro, ..features }
}

/// The features of a new volume: the usual ones, changed by `lists`.
pub(super) fn chosen<'a>(lists: impl Iterator<Item = &'a str>) -> Result<MkfsFeatures> {
    let mut features = usual();
    for list in lists {
        features.apply(list).map_err(usage)?;
    }
    Ok(features)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_are_listed_are_taken() {
        for NamedFeature { name, alias, .. } in &FEATURES {
            for name in [Some(*name), *alias].into_iter().flatten() {
                chosen([name].into_iter()).unwrap_or_else(|failure| panic!("{name}: {failure}"));
            }
        }
        chosen(["quota"].into_iter()).expect_err("it is not made");
    }
}
