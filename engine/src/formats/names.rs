//! Which linears a rule of a configuration means: by name, by regular expression (at the name's start), or all of them by their class.

use fancy_regex::{Regex, RegexBuilder};

use super::{refuse, shown};
use crate::Result;

/// Backtracking steps of one match: what real rules need on the names of linears is far below, hostile ones end here.
const STEPS: usize = 100_000;
/// Bytes of a compiled rule.
const COMPILED: usize = 1 << 20;

/// One rule.
#[derive(Debug, Clone)]
pub(super) enum Rule {
    /// The class `Linear`: every linear.
    Every,
    /// This one.
    Name(String),
    /// Those whose name begins with a match.
    Pattern(Regex),
}

impl PartialEq for Rule {
    fn eq(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Every, Self::Every) => true,
            (Self::Name(a), Self::Name(b)) => a == b,
            (Self::Pattern(a), Self::Pattern(b)) => a.as_str() == b.as_str(),
            _ => false,
        }
    }
}

impl Rule {
    /// `re:` begins a regular expression, `Linear` is the class, all else is a name. `field` is for errors.
    pub(super) fn parse(field: &str, text: &str) -> Result<Self> {
        match text.strip_prefix("re:") {
            Some(pattern) => Self::pattern(field, pattern),
            None if text == "Linear" => Ok(Self::Every),
            None => Ok(Self::Name(text.to_owned())),
        }
    }

    /// A regular expression that must match at the start of a name.
    pub(super) fn pattern(field: &str, pattern: &str) -> Result<Self> {
        RegexBuilder::new(&format!("^(?:{pattern})"))
            .backtrack_limit(STEPS)
            .delegate_size_limit(COMPILED)
            .build()
            .map(Self::Pattern)
            .map_err(|_| {
                refuse(&format!(
                    "{field} has the regular expression {}, which is not one: correct it",
                    shown(pattern)
                ))
            })
    }

    /// Less for rules that mean fewer linears.
    pub(super) fn breadth(&self) -> u8 {
        match self {
            Self::Name(_) => 0,
            Self::Pattern(_) => 1,
            Self::Every => 2,
        }
    }

    /// Whether the linear `name` is meant. A pattern that gives up after too many steps means nothing.
    pub(super) fn means(&self, name: &str) -> bool {
        match self {
            Self::Every => true,
            Self::Name(own) => own == name,
            Self::Pattern(pattern) => pattern.is_match(name).unwrap_or(false),
        }
    }
}

/// All rules of a list.
pub(super) fn rules(field: &str, texts: &[String]) -> Result<Vec<Rule>> {
    texts.iter().map(|text| Rule::parse(field, text)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rule_means_a_name_a_pattern_from_the_start_or_every_linear() {
        let means = |rule: &str, name: &str| Rule::parse("ignore", rule).unwrap().means(name);
        assert!(means("lm_head", "lm_head") && !means("lm_head", "model.lm_head"));
        assert!(means("re:.*lm_head", "model.lm_head") && !means("re:lm_head", "model.lm_head"));
        assert!(means("re:(?!.*down).*", "a.up") && !means("re:(?!.*down).*", "a.down"));
        assert!(means("Linear", "anything"));
    }

    #[test]
    fn a_broken_or_explosive_pattern_does_no_harm() {
        let error = Rule::parse("ignore", "re:(").unwrap_err();
        assert!(
            error
                .message
                .contains("ignore has the regular expression ("),
            "{error}"
        );
        let slow = Rule::parse("ignore", r"re:(?=(a+)+b)(\1)*(a*)*c").unwrap();
        assert!(!slow.means(&"a".repeat(200)));
    }
}
