//! The features of new volumes, by their names in `mkfs.btrfs -O`.

use offshoot_btrfs_format::superblock::{CompatRo, Incompat};
use offshoot_vfs::{Code, Error, Result};

use super::invalid;

/// The meaning of a name.
enum FeatureMeaning {
    /// Bits of the superblock.
    Bits(Incompat, CompatRo),
    /// Nothing to set, because the profiles imply it.
    Implied,
    /// A feature of the format that this engine cannot make.
    NotWritten,
}

/// All known names. An alias follows its feature.
const NAMES: [(&str, FeatureMeaning); 15] = {
    use FeatureMeaning::{Bits, Implied, NotWritten};
    const NO_INCOMPAT: Incompat = Incompat(0);
    const NO_COMPAT_RO: CompatRo = CompatRo(0);
    const FREE_SPACE_TREE: FeatureMeaning =
        Bits(NO_INCOMPAT, CompatRo::FREE_SPACE_TREE.union(CompatRo::FREE_SPACE_TREE_VALID));
    [
        ("mixed-bg", Bits(Incompat::MIXED_GROUPS, NO_COMPAT_RO)),
        ("extref", Bits(Incompat::EXTENDED_IREF, NO_COMPAT_RO)),
        ("skinny-metadata", Bits(Incompat::SKINNY_METADATA, NO_COMPAT_RO)),
        ("no-holes", Bits(Incompat::NO_HOLES, NO_COMPAT_RO)),
        ("free-space-tree", FREE_SPACE_TREE),
        ("fst", FREE_SPACE_TREE),
        ("block-group-tree", Bits(NO_INCOMPAT, CompatRo::BLOCK_GROUP_TREE)),
        ("bgt", Bits(NO_INCOMPAT, CompatRo::BLOCK_GROUP_TREE)),
        ("raid1c34", Implied),
        ("raid56", NotWritten),
        ("quota", NotWritten),
        ("squota", NotWritten),
        ("zoned", NotWritten),
        ("raid-stripe-tree", NotWritten),
        ("extent-tree-v2", NotWritten),
    ]
};

/// The features of a new volume.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MkfsFeatures {
    /// Features that a reader must know. Those that follow from the node size and the profiles are
    /// added automatically.
    pub incompat: Incompat,
    /// Features that a writer must know.
    pub compat_ro: CompatRo,
}

impl Default for MkfsFeatures {
    /// The features that the current `mkfs.btrfs` turns on.
    fn default() -> Self {
        Self {
            incompat: Incompat::EXTENDED_IREF
                .union(Incompat::SKINNY_METADATA)
                .union(Incompat::NO_HOLES),
            compat_ro: CompatRo::FREE_SPACE_TREE
                .union(CompatRo::FREE_SPACE_TREE_VALID)
                .union(CompatRo::BLOCK_GROUP_TREE),
        }
    }
}

impl MkfsFeatures {
    /// Features that a new volume can have or always has.
    const KNOWN: Self = Self {
        incompat: Incompat::MIXED_BACKREF
            .union(Incompat::BIG_METADATA)
            .union(Incompat::MIXED_GROUPS)
            .union(Incompat::EXTENDED_IREF)
            .union(Incompat::SKINNY_METADATA)
            .union(Incompat::NO_HOLES)
            .union(Incompat::RAID1C34),
        compat_ro: CompatRo::FREE_SPACE_TREE
            .union(CompatRo::FREE_SPACE_TREE_VALID)
            .union(CompatRo::BLOCK_GROUP_TREE),
    };

    /// Turns on the features in `list`, which is separated by commas, and turns off those with a
    /// `^` before their name: `bgt,^no-holes`.
    ///
    /// # Errors
    /// `EINVAL` for an unknown name; [`Error::Unsupported`] for a feature that this engine cannot
    /// make.
    pub fn apply(&mut self, list: &str) -> Result<()> {
        for word in list.split(',').filter(|word| !word.is_empty()) {
            let (name, on) = word.strip_prefix('^').map_or((word, true), |name| (name, false));
            let Some((_, meaning)) = NAMES.iter().find(|(known, _)| *known == name) else {
                let known: Vec<_> = NAMES.iter().map(|(name, _)| *name).collect();
                return Err(invalid(format!(
                    "there is no feature {name}; there are {}",
                    known.join(", ")
                )));
            };
            match meaning {
                FeatureMeaning::Bits(incompat, compat_ro) if on => {
                    self.incompat = self.incompat.union(*incompat);
                    self.compat_ro = self.compat_ro.union(*compat_ro);
                }
                FeatureMeaning::Bits(incompat, compat_ro) => {
                    self.incompat = self.incompat.without(*incompat);
                    self.compat_ro = self.compat_ro.without(*compat_ro);
                }
                FeatureMeaning::NotWritten if on => {
                    return Err(Error::unsupported(
                        Code::NewVolume,
                        format!("making a volume with {name}"),
                    ));
                }
                FeatureMeaning::Implied | FeatureMeaning::NotWritten => {}
            }
        }
        Ok(())
    }

    /// Checks that this engine can make the features, and that they do not contradict each other.
    pub(super) fn verify(self) -> Result<()> {
        let unknown = [
            self.incompat.without(Self::KNOWN.incompat).names(),
            self.compat_ro.without(Self::KNOWN.compat_ro).names(),
        ]
        .concat();
        if !unknown.is_empty() {
            let names = unknown.join(", ");
            return Err(Error::unsupported(
                Code::NewVolume,
                format!("making a volume with {names}"),
            ));
        }
        let free_space_tree = self.compat_ro.has(CompatRo::FREE_SPACE_TREE);
        if free_space_tree != self.compat_ro.has(CompatRo::FREE_SPACE_TREE_VALID) {
            return Err(invalid("FREE_SPACE_TREE and FREE_SPACE_TREE_VALID go together"));
        }
        let no_holes = self.incompat.has(Incompat::NO_HOLES);
        if self.compat_ro.has(CompatRo::BLOCK_GROUP_TREE) && !(free_space_tree && no_holes) {
            return Err(invalid(
                "block-group-tree needs free-space-tree and no-holes; leave it out with \
                 ^block-group-tree",
            ));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lists_turn_on_and_off() {
        let mut features = MkfsFeatures::default();
        features.apply("mixed-bg,^skinny-metadata,^bgt,raid1c34,^quota").unwrap();
        assert!(features.incompat.has(Incompat::MIXED_GROUPS));
        assert!(!features.incompat.has(Incompat::SKINNY_METADATA));
        assert!(!features.compat_ro.has(CompatRo::BLOCK_GROUP_TREE));
        features.apply("").unwrap();
        features.verify().unwrap();
    }

    #[test]
    fn what_is_not_written_is_refused_by_name() {
        for name in ["quota", "squota", "zoned", "raid-stripe-tree", "raid56", "extent-tree-v2"] {
            let error = MkfsFeatures::default().apply(name).unwrap_err();
            assert!(
                matches!(&error, Error::Unsupported { what, .. } if what.contains(name)),
                "{error}"
            );
        }
        let error = MkfsFeatures::default().apply("skiny-metadata").unwrap_err();
        assert!(matches!(error, Error::Posix { .. }), "{error}");
        let features = MkfsFeatures { incompat: Incompat::ZONED, ..MkfsFeatures::default() };
        let error = features.verify().unwrap_err();
        assert!(error.to_string().contains("ZONED"), "{error}");
    }

    #[test]
    fn a_block_group_tree_does_not_stand_alone() {
        for off in ["^free-space-tree", "^no-holes"] {
            let mut features = MkfsFeatures::default();
            features.apply(off).unwrap();
            features.verify().unwrap_err();
            features.apply("^block-group-tree").unwrap();
            features.verify().unwrap();
        }
    }
}
